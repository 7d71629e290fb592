"""The Triton kernels do what the reference does: on a GPU, or without one in Triton's interpreter."""

import importlib
import importlib.util
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, get_args

import pytest
import torch
from cases import SUMS, summed, vector
from torch import Tensor

from thinwire import kernels
from thinwire.codecs import ChunkTopK
from thinwire.formats import Coded, Format, Levels, OffsetFloat, Sign, Ternary
from thinwire.kernels import Kernel, Sum, dispatch
from thinwire.kernels.bits.reference import CODED
from thinwire.kernels.dispatch import triton_is_there
from thinwire.kernels.parts import Cut, Fit, Parts, cut_of_runs
from thinwire.kernels.subsets.reference import table_of
from thinwire.kernels.sums import How
from thinwire.payloads import Chunks, Dense, Narrow, exponents, indices, numbers
from thinwire_lab.check.cases import CASES
from thinwire_lab.check.material import Kit, difference

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed: pip install -e '.[triton]'", allow_module_level=True)
shared = importlib.import_module("thinwire.kernels.triton")
packing = importlib.import_module("thinwire.kernels.bits.triton")
sampling = importlib.import_module("thinwire.kernels.sampled.triton")
scattering = importlib.import_module("thinwire.kernels.scatter.triton")
selecting = importlib.import_module("thinwire.kernels.select.triton")


@pytest.fixture(autouse=True)
def _rounds_to_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have Triton's interpreter round float32 to bfloat16 as GPUs do: it cuts bits off."""
    interpreter = importlib.import_module("triton.runtime.interpreter")
    plain, language = interpreter._convert_float, importlib.import_module("triton.language")

    def convert(x: Any, source: Any, target: Any, rounding: Any) -> Any:
        if (source, target) != (language.float32, language.bfloat16):
            return plain(x, source, target, rounding)
        return torch.tensor(x).bfloat16().view(torch.uint16).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", convert)


SEVERAL_TILES = 2 * 4096 + 17
INPUTS: dict[str, Callable[[torch.dtype], Tensor]] = {
    "empty": lambda dtype: torch.empty(0, dtype=dtype),
    "one": lambda dtype: vector(1, dtype=dtype),
    "63": lambda dtype: vector(63, dtype=dtype),
    "1000": lambda dtype: vector(1000, dtype=dtype),
    "several tiles": lambda dtype: vector(SEVERAL_TILES, dtype=dtype),
    "zeros": lambda dtype: torch.zeros(1000, dtype=dtype),
    "equal": lambda dtype: torch.ones(SEVERAL_TILES, dtype=dtype),
    "few values": lambda dtype: vector(SEVERAL_TILES, dtype=dtype).round(),
    "one NaN": lambda dtype: vector(1000, dtype=dtype).index_fill(0, torch.tensor([501]), -torch.nan),
    "one Inf": lambda dtype: vector(1000, dtype=dtype).index_fill(0, torch.tensor([999]), -torch.inf),
    "denormal": lambda dtype: torch.full((100,), torch.finfo(dtype).tiny / 4, dtype=dtype),
}
ODD = {"empty", "63", "several tiles", "few values", "one NaN"}
inputs = pytest.mark.parametrize(
    "make", [pytest.param(make, id=name, marks=[pytest.mark.slow] * (name not in ODD)) for name, make in INPUTS.items()]
)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


def framed(x: Tensor) -> Tensor:
    """Return a copy in the middle of a tensor of NaN, or of numbers that are no index."""
    poison = torch.nan if x.is_floating_point() else 99
    frame = torch.full((x.numel() + 128,), poison, dtype=x.dtype, device=DEVICE)
    frame[64 : 64 + x.numel()] = x.to(DEVICE)
    return frame[64 : 64 + x.numel()]


def poisoned(like: Tensor) -> Tensor:
    """Return room for a result, in the same surroundings."""
    return framed(torch.full_like(like, torch.nan))


def intact(*views: Tensor) -> bool:
    """Whether nothing around the views was written to."""
    edges = [edge for view in views for edge in (view._base[:64], view._base[-64:])]  # type: ignore[index]
    return all(bool((edge.isnan() if edge.is_floating_point() else edge == 99).all()) for edge in edges)


@contextmanager
def waiting_forbidden(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail where the host would wait for the device."""

    def wait(*_: object, **__: object) -> None:
        raise AssertionError("the host waits for the device")

    with monkeypatch.context() as patch:
        if DEVICE.type == "cpu":  # the interpreter itself reads tensors, but with other functions
            for name in ("item", "tolist", "nonzero", "__bool__", "__float__", "__int__", "unique"):
                patch.setattr(Tensor, name, wait)
            yield
        else:
            with warnings.catch_warnings(action="ignore"):  # that it is a prototype
                torch.cuda.set_sync_debug_mode("error")
            try:
                yield
            finally:
                torch.cuda.set_sync_debug_mode("default")


def same_picks(found: kernels.Picks, expected: kernels.Picks, capacity: int) -> None:
    count = expected.indices.numel()
    assert found.indices.dtype == torch.int32
    assert found.indices[:count].tolist() == expected.indices.tolist()
    assert found.indices[count:].tolist() == [-1] * (capacity - count)
    torch.testing.assert_close(found.peak, expected.peak, rtol=0, atol=0, equal_nan=True)


def threshold_of(x: Tensor, quantile: float) -> Tensor:
    finite = x[x.isfinite()].abs()
    return finite.quantile(quantile) if finite.numel() else x.new_zeros(())


@pytest.mark.grid
@inputs
@dtypes
def test_select(make: Callable[[torch.dtype], Tensor], dtype: torch.dtype) -> None:
    x = framed(make(dtype))
    half, zero, nan, n = threshold_of(x, 0.5), x.new_zeros(()), x.new_full((), torch.nan), x.numel()
    for threshold, capacity in ((threshold_of(x, 0.99), n + 5), (half, n), (half, 10), (half, 0), (zero, 1), (nan, 3)):
        same_picks(
            kernels.select.gpu(x, threshold, capacity), kernels.select.reference(x, threshold, capacity), capacity
        )


@pytest.mark.grid
@inputs
@dtypes
def test_largest(make: Callable[[torch.dtype], Tensor], dtype: torch.dtype) -> None:
    x = framed(make(dtype))
    for k in {0, x.numel() // 100, x.numel() // 2, x.numel()}:
        assert torch.equal(kernels.largest.gpu(x, k), kernels.largest.reference(x, k))


@pytest.mark.grid
@inputs
@dtypes
@pytest.mark.parametrize("how", SUMS)
def test_sums(make: Callable[[torch.dtype], Tensor], dtype: torch.dtype, how: How) -> None:
    plain, selected, expected = (summed(how, make(dtype), frame=framed) for _ in range(3))
    one, n = plain.gradients[0].new_ones(()), plain.outs[0].numel()
    kernels.accumulate.reference(expected)
    kernels.accumulate.gpu(plain)
    found = kernels.accumulate_select.gpu(selected, one, 10)
    near: Any = {"rtol": 2**-7, "atol": 0} if how == "rounded" else {}
    for name in ("outs", "moving"):
        columns = [getattr(sums, name) or [] for sums in (plain, selected, expected)]
        torch.testing.assert_close(columns[0], columns[2], equal_nan=True, **near)
        if how == "sum":  # alone it is torch's own
            torch.testing.assert_close(columns[1], columns[0], equal_nan=True)
        else:
            torch.testing.assert_close(columns[1], columns[0], equal_nan=True, rtol=0, atol=0)
        assert intact(*columns[0], *columns[1])
    off = int((plain.outs[0].nan_to_num() != expected.outs[0].nan_to_num()).sum())
    assert how != "rounded" or off <= n // 1000, "a fused multiply-add may differ"
    same_picks(found, kernels.select.reference(selected.outs[0], one, 10), 10)


def test_a_scale_that_is_not_finite_picks_nothing_outside() -> None:
    gradient = framed(vector(63))
    sums = Sum([poisoned(gradient)], [gradient], [gradient], [torch.nan])
    found = kernels.accumulate_select.gpu(sums, gradient.new_ones(()), 100)
    assert found.indices.tolist() == [*range(63), *[-1] * 37]


def payload(ranks: int, regions: int, length: int, per_run: int, seed: int = 0) -> tuple[Tensor, tuple[int, ...]]:
    """Return indices as of so many payloads behind one another, each ascending over the regions from 100 on."""
    generator = torch.Generator().manual_seed(seed)
    runs = [
        torch.randperm(length, generator=generator)[:per_run].sort().values + 100 + region * length
        for _ in range(ranks)
        for region in range(regions)
    ]
    return torch.cat(runs).int(), tuple(run.numel() for run in runs)


@dtypes
@pytest.mark.parametrize(
    ("ranks", "regions", "length", "per_run"),
    [
        (1, 1, 63, 10),
        (3, 1, 40_000, 900),
        (2, 3, 1000, 999),
        (4, 2, 20_000, 31),
        (2, 2, 100, 0),
        (0, 1, 100, 0),
        (33, 1, 1000, 9),
    ],
)
def test_scatter(ranks: int, regions: int, length: int, per_run: int, dtype: torch.dtype) -> None:
    indices, runs = payload(ranks, regions, length, per_run) if ranks else (torch.empty(0, dtype=torch.int32), ())
    values = framed(vector(indices.numel(), dtype=dtype))
    where = [(100 + region * length, length) for region in range(regions)]
    ascending = framed(indices)
    shuffled = framed(torch.cat([run.flip(0) for run in indices.split(list(runs))]) if ranks else indices)
    for places, known in ((ascending, True), (ascending, False), (shuffled, False)):
        for stretches in (runs, (sum(runs),)) if ranks == 1 else (runs,):
            found = framed(vector(length * regions + 200, dtype=dtype))
            expected = found.clone()
            kernels.scatter.gpu(found, where, places, values, stretches, known)
            kernels.scatter.reference(expected, where, places, values, stretches)
            assert torch.equal(found, expected)
            kernels.scatter_add.gpu([found], [0], places, values, stretches, -1.0)
            kernels.scatter_add.reference([expected], [0], places, values, stretches, -1.0)
            assert torch.equal(found, expected)
            assert intact(found)


def test_scatter_to_spans_apart_with_padding_and_nan() -> None:
    regions = ((700, 300), (0, 100), (100, 50))
    indices = framed(torch.tensor([3, 99, 99, 149, 701, 999, 999, 5, 99, 99, 149, 703, 703, 999], dtype=torch.int32))
    values = framed(torch.tensor([1.0, 2, 0, torch.nan, 5, 6, 0, 7, 8, 0, 9, 10, 0, torch.inf]))
    for runs in ((3, 1, 3, 3, 1, 3), (7, 7)):
        found = framed(torch.full((1100,), 4.0))
        expected = found.clone()
        kernels.scatter.gpu(found, regions, indices, values, runs)
        kernels.scatter.reference(expected, regions, indices, values, runs)
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
        assert intact(found)


@dtypes
def test_scatter_adds_in_the_order_of_the_runs(dtype: torch.dtype) -> None:
    big = 1e8 if dtype == torch.float32 else 1e17
    values, indices = torch.tensor([1.0, big, -big], dtype=dtype, device=DEVICE), torch.full((3,), 7, device=DEVICE)
    for runs in ((1, 1, 1), (1, 0, 1, 0, 1)):
        for call in (kernels.scatter.gpu, kernels.scatter.reference):
            out = torch.ones(10, dtype=dtype, device=DEVICE)
            call(out, ((0, 10),), indices.int(), values, runs)
            assert out.tolist() == [0.0] * 10, "(1 + big) - big"


def test_scatter_of_more_elements_than_32_bits_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scattering, "_NARROW", 0)
    indices, runs = payload(3, 2, 20_000, 900)
    values = vector(indices.numel()).to(DEVICE)
    for known in (True, False):
        found, where = vector(40_200).to(DEVICE), [(100, 20_000), (20_100, 20_000)]
        expected = found.clone()
        kernels.scatter.gpu(found, where, indices.to(DEVICE), values, runs, known)
        kernels.scatter.reference(expected, where, indices.to(DEVICE), values, runs)
        assert torch.equal(found, expected)


def test_scatter_counts_in_32_bits_as_far_as_they_go() -> None:
    most = 2**31 - 1
    found = [scattering._on(ends, DEVICE).dtype for ends in ((), (0, most), (0, most + 1))]
    assert found == [torch.int32, torch.int32, torch.int64]


@dtypes
@pytest.mark.parametrize("numel", [0, 1, 63, 3000])
def test_mask(numel: int, dtype: torch.dtype) -> None:
    indices = framed(torch.randperm(3000, generator=torch.Generator().manual_seed(0))[:numel].int())
    values = framed(vector(numel, dtype=dtype).round().index_fill(0, torch.arange(min(1, numel)), torch.nan))
    found = framed(vector(3000, dtype=dtype))
    expected = found.clone()
    for offset in (0, 7):
        kernels.scatter_add.gpu((), [offset], indices + offset, values, [numel], masked=[found])
        kernels.scatter_add.reference((), [offset], indices + offset, values, [numel], masked=[expected])
        assert torch.equal(found, expected)
        assert intact(found)


@pytest.mark.grid
@pytest.mark.parametrize("slots", [1, 1000, 3000])
@pytest.mark.parametrize("numel", [0, 1, 1500])
@pytest.mark.parametrize("seed", [5, 2**32 - 1, 2**62])
def test_hashed_slots(slots: int, numel: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(numel)
    indices = torch.randperm(50_000, generator=generator)[:numel].int()
    indices[5::7] = -1
    for most in (1, 3, 2**31 - 1):
        priorities = torch.randint(0, most, (numel,), generator=generator, dtype=torch.int32)
        args = ([framed(vector(50_000))], framed(indices), framed(priorities), [numel], [slots], [seed], [(7, 50_000)])
        calls = (kernels.hashed_slots_of_each.gpu, kernels.hashed_slots_of_each.reference)
        torch.testing.assert_close(*(call(*args) for call in calls), rtol=0, atol=0)


@pytest.mark.grid
@inputs
@dtypes
@pytest.mark.parametrize("width", [5, 3000])
def test_block_energies(make: Callable[[torch.dtype], Tensor], dtype: torch.dtype, width: int) -> None:
    x = framed(make(dtype))
    found, expected = kernels.block_energies.gpu(x, width), kernels.block_energies.reference(x, width)
    torch.testing.assert_close(found, expected, equal_nan=True)
    k = found.numel() // 3
    assert torch.equal(kernels.largest_blocks.gpu(x, width, k), kernels.largest.reference(found, k))


@pytest.mark.grid
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("rows", "width"),
    [(0, 1), (0, 7), (1, 1), (5, 1), (2, 63), (3, 64), (2, 300), pytest.param(2, 3000, marks=pytest.mark.slow)],
)
def test_largest_in_rows(rows: int, width: int, dtype: torch.dtype) -> None:
    smooth = vector(rows * width).to(dtype)
    odd = smooth.clone()
    odd[width // 2 :: width], odd[-2:] = -torch.nan, torch.inf
    for content in (smooth, smooth.round(), torch.zeros_like(smooth), odd):
        x = framed(content)
        for k in {0, 1, width // 3, width}:
            found = kernels.largest_in_rows.gpu(x, width, k)
            assert found.dtype == torch.int32
            assert torch.equal(found, kernels.largest_in_rows.reference(x, width, k))
        assert intact(x)


def test_rows_too_wide_for_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    x = framed(vector(SEVERAL_TILES // 3 * 3).round())
    expected = kernels.largest_in_rows.reference(x, x.numel() // 3, 100)
    assert torch.equal(kernels.largest_in_rows.gpu(x, x.numel() // 3, 100), expected)
    monkeypatch.setattr(importlib.import_module("thinwire.kernels.blocks.triton"), "_WIDEST", 1000)
    assert torch.equal(kernels.largest_in_rows.gpu(x, x.numel() // 3, 100), expected)


@pytest.mark.grid
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
@pytest.mark.parametrize("numel", [0, 1, 7, 31, 3000])
def test_bits(numel: int, dtype: torch.dtype) -> None:
    info = torch.iinfo(dtype)
    for bits in range(1, {torch.uint8: 9, torch.int16: 16, torch.int32: 32}[dtype]):
        codes = framed(
            torch.randint(info.min, info.max, (numel,), generator=torch.Generator().manual_seed(bits), dtype=dtype)
        )
        packed = kernels.pack_bits.gpu(codes, bits)
        assert torch.equal(packed, kernels.pack_bits.reference(codes, bits))
        longer = torch.cat([packed, packed.new_full((9,), 255)])
        for buffer in (framed(packed), framed(longer)):
            found = kernels.unpack_bits.gpu(buffer, numel, bits, dtype)
            assert torch.equal(found, kernels.unpack_bits.reference(packed, numel, bits, dtype))


@pytest.mark.grid
@pytest.mark.parametrize("group", [7, 5000])
@pytest.mark.parametrize("code", [torch.uint8, torch.int16])
@pytest.mark.parametrize("make", [INPUTS[name] for name in ("empty", "one", "several tiles", "zeros", "one NaN")])
def test_codes(make: Callable[[torch.dtype], Tensor], code: torch.dtype, group: int) -> None:
    x = framed(make(torch.float32))
    groups = kernels.Groups((x.numel(),), group)
    norms = kernels.group_norms.reference(x, groups, torch.inf).float()
    norms = torch.where(norms.isfinite() & (norms > 0), norms, torch.where(norms == 0, 1.0, torch.nan))
    powers, table = torch.exp2(norms.log2().ceil()), framed(vector(64))
    grids = [(20, 0x3E0, 33, 33), (23, 0x78, 10, 5)]
    offsets = [kernels.OffsetGrid(*grid, rounding) for grid in grids for rounding in get_args(kernels.Rounding)]
    for how in (*offsets, kernels.UniformGrid(7), kernels.UniformGrid(7, nearest=True), "ternary"):
        args = (x, framed(powers if how in offsets else norms), groups, how, [2**63 + 5])
        same_codes(kernels.codes_encode.gpu, kernels.codes_encode.reference, code, table, *args)


@pytest.mark.parametrize("order", [1.0, 2.0, torch.inf])
@pytest.mark.parametrize("size", [None, 1, 7, 512])
def test_the_norm_of_a_group_depends_on_nothing_else(size: int | None, order: float) -> None:
    """To the bit, whatever is summed in the same launch; also where a group is of several tiles."""
    xs = [vector(n, seed=n) for n in (5, 4097, 0, 3 * shared.TILE + 1, 600)]
    xs[1][9] = -torch.nan
    runs = tuple(x.numel() for x in xs)
    together = kernels.group_norms.gpu(framed(torch.cat(xs)), kernels.Groups(runs, size), order)
    alone = [kernels.group_norms.gpu(framed(x), kernels.Groups((x.numel(),), size), order) for x in xs]
    assert torch.equal(together.nan_to_num(-7), torch.cat(alone).nan_to_num(-7))
    expected = kernels.group_norms.reference(torch.cat(xs), kernels.Groups(runs, size), order)
    torch.testing.assert_close(together.cpu(), expected, rtol=1e-12, atol=0, equal_nan=True)


def same_codes(
    encode: Callable[..., None], like: Callable[..., None], code: torch.dtype, table: Tensor, x: Tensor, *rest: Any
) -> None:
    codes, expected = (framed(torch.zeros(x.numel(), dtype=code)) for _ in range(2))
    encode(codes, x, *rest)
    like(expected, x, *rest)
    assert torch.equal(codes, expected)
    assert intact(codes)
    if len(rest) > 1:
        for dtype in (torch.float32, torch.float16):
            out, wanted = poisoned(x.to(dtype)), poisoned(x.to(dtype))
            kernels.table_decode.gpu(out, codes, table, *rest[:2])
            kernels.table_decode.reference(wanted, codes, table, *rest[:2])
            torch.testing.assert_close(out, wanted, rtol=0, atol=0, equal_nan=True)
            assert intact(out)


@pytest.mark.grid
@pytest.mark.parametrize("make", [INPUTS[name] for name in ("empty", "one", "1000", "zeros", "one NaN", "one Inf")])
@dtypes
@pytest.mark.parametrize(("rows", "buckets"), [(1, 7), (4, 300)])
def test_sketch(make: Callable[[torch.dtype], Tensor], dtype: torch.dtype, rows: int, buckets: int) -> None:
    x = framed(make(dtype))
    table = kernels.sketch_insert.gpu(x, rows, buckets, 2**40)
    torch.testing.assert_close(
        table, kernels.sketch_insert.reference(x, rows, buckets, 2**40), equal_nan=True, atol=1e-4, rtol=1e-5
    )
    table = framed(table.view(-1)).view(rows, buckets)
    found, expected = (
        query(table, x.numel(), 2**40) for query in (kernels.sketch_query.gpu, kernels.sketch_query.reference)
    )
    torch.testing.assert_close(found, expected, equal_nan=True, rtol=0, atol=0)


@dtypes
def test_factors_and_spectra(dtype: torch.dtype) -> None:
    """The device's libraries, which round in other places than the reference."""
    a, b = (framed(vector(n * 4, seed=n, dtype=dtype)).view(n, 4) for n in (300, 70))
    out = poisoned(vector(300 * 70, dtype=dtype))
    q = kernels.orthonormal.gpu(a)
    torch.testing.assert_close(q, kernels.orthonormal.reference(a), atol=1e-5, rtol=1e-4)
    kernels.outer_sums.gpu(out.view(300, 70), q, b)
    expected = torch.empty_like(out).view(300, 70)
    kernels.outer_sums.reference(expected, q, b)
    assert torch.equal(out.view(300, 70), expected)  # whatever the user lets products be rounded to
    assert intact(out)
    pairs = framed(vector(5 * 129 * 2, dtype=dtype)).view(-1, 2)
    found, expected = (
        transform(pairs, 1200, 256) for transform in (kernels.inverse_fourier.gpu, kernels.inverse_fourier.reference)
    )
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def test_a_sketch_of_several_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    x = framed(vector(1000))
    whole = kernels.sketch_insert.gpu(x, 2, 30, 3)
    monkeypatch.setattr(importlib.import_module("thinwire.kernels.hashing.triton"), "_PART", 300)
    torch.testing.assert_close(kernels.sketch_insert.gpu(x, 2, 30, 3), whole)


CHUNKINGS = [
    pytest.param(shape, chunk, transform, id=f"{shape} {chunk} {transform}", marks=[pytest.mark.slow] * (i % 2))
    for i, (shape, chunk, transform) in enumerate(
        [
            ((50, 48), 16, "dct"),
            ((33, 20), 16, "dct"),
            ((5, 3, 3, 3), 16, "dct"),
            ((13, 29), 7, "dct"),
            ((66, 64), 64, "dct"),
            ((700,), 64, "dct"),
            ((50, 48), 16, "hadamard"),
            ((300,), 16, "hadamard"),
            ((17, 33), 16, None),
            ((257, 8), 16, None),
            ((1,), 16, "dct"),
            ((0, 5), 16, "dct"),
        ]
    )
]
chunkings = pytest.mark.parametrize(("shape", "chunk", "transform"), CHUNKINGS)


def cut_as(shape: tuple[int, ...], chunk: int, transform: Any, density: float = 0.05) -> kernels.Chunking:
    return kernels.Chunking.of(shape, chunk, transform, lambda size: max(1, round(density * size)))


@pytest.mark.grid
@chunkings
@dtypes
def test_chunk_topk(shape: tuple[int, ...], chunk: int, transform: Any, dtype: torch.dtype) -> None:
    smooth = vector(cut_as(shape, chunk, transform).numel, dtype=dtype)
    for density, content in ((0.05, smooth), (0.5, smooth.round()), (1.0, smooth), (0.1, torch.zeros_like(smooth))):
        cut, x = cut_as(shape, chunk, transform, density), framed(content)
        (positions, values), (others, expected) = (
            each([x], [cut]) for each in (kernels.chunk_topk.gpu, kernels.chunk_topk.reference)
        )
        assert (positions.dtype, values.dtype) == (torch.int16, dtype)
        assert_chosen(positions, values, expected, cut)
        if transform is None:
            assert torch.equal(positions, others)
            assert torch.equal(values, expected)


def assert_chosen(positions: Tensor, values: Tensor, expected: Tensor, cut: kernels.Chunking) -> None:
    """Hold picks against the reference's: ascending positions in the chunk, and magnitudes equal but for rounding."""
    places = positions.view(cut.chunks, cut.kept)
    assert bool((places.diff(dim=1) > 0).all())
    assert bool(((places >= 0) & (places < cut.size)).all())
    found, least = (each.abs().view(cut.chunks, cut.kept).sort().values for each in (values, expected))
    close = 100 * torch.finfo(values.dtype).eps
    torch.testing.assert_close(found, least, rtol=close, atol=close)


@pytest.mark.grid
@chunkings
@dtypes
def test_chosen_coefficients_are_where_they_are_said_to_be(
    shape: tuple[int, ...], chunk: int, transform: Any, dtype: torch.dtype
) -> None:
    """Of each chunk exactly the coefficients at the positions are returned, and no larger one is left out."""
    cut = cut_as(shape, chunk, transform, 0.1)
    x, every = framed(vector(cut.numel, dtype=dtype)), cut_as(shape, chunk, transform, 1.0)
    positions, values = kernels.chunk_topk.gpu([x], [cut])
    whole = kernels.chunk_topk.gpu([x], [every])[1].view(cut.chunks, cut.size)
    chosen = positions.view(cut.chunks, cut.kept).long()
    assert torch.equal(whole.gather(1, chosen).view(-1), values)
    rest = whole.abs().scatter(1, chosen, 0)
    assert bool((rest.amax(1) <= values.abs().view(cut.chunks, cut.kept).amin(1)).all() if cut.chunks else True)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # the interpreter's
@pytest.mark.parametrize("transform", ["dct", "hadamard", None])
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_in_its_chunk(transform: Any, poison: float) -> None:
    cut, x = cut_as((40, 48), 16, transform), framed(vector(40 * 48))
    x[17 * 48 + 20] = poison
    positions, values = kernels.chunk_topk.gpu([x], [cut])
    out = poisoned(x)
    kernels.chunk_put.gpu([out], positions[None], values[None], [cut], subtract=False)
    rows, columns = (~out.view(40, 48).isfinite()).nonzero(as_tuple=True)
    assert {(int(i) // cut.height, int(j) // cut.width) for i, j in zip(rows, columns, strict=True)} == {
        (17 // cut.height, 20 // cut.width)
    }
    if transform:
        chunk = 17 // cut.height * cut.across + 20 // cut.width
        expected = kernels.chunk_topk.reference([x.clone()], [cut])[0].view(-1, cut.kept)[chunk]
        assert positions.view(-1, cut.kept)[chunk].equal(expected), "NaN before infinity, and lower positions first"


@pytest.mark.grid
@chunkings
@dtypes
@pytest.mark.parametrize("ranks", [1, 3])
def test_chunks_transformed_back(
    shape: tuple[int, ...], chunk: int, transform: Any, dtype: torch.dtype, ranks: int
) -> None:
    cut = cut_as(shape, chunk, transform, 0.02)
    chosen = [kernels.chunk_topk.reference([vector(cut.numel, seed=rank, dtype=dtype)], [cut]) for rank in range(ranks)]
    positions, values = (framed(torch.cat(parts)).view(ranks, -1) for parts in zip(*chosen, strict=True))
    for subtract in (False, True):
        found, expected = (framed(vector(cut.numel, seed=9, dtype=dtype)) for _ in range(2))
        kernels.chunk_put.gpu([found], positions, values, [cut], subtract)
        kernels.chunk_put.reference([expected], positions, values, [cut], subtract)
        assert torch.equal(found, expected)
        on_cpu = vector(cut.numel, seed=9, dtype=dtype)
        kernels.chunk_put.cpu([on_cpu], positions.cpu(), values.cpu(), [cut], subtract)
        assert torch.equal(found.cpu(), on_cpu)
        assert intact(found)


def test_more_chunks_than_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("thinwire.kernels.chunks.triton"), "PROGRAMS", 2)
    cut = cut_as((16 * 5, 16 * 16), 16, "dct")
    positions, values = kernels.chunk_topk.reference([vector(cut.numel).to(DEVICE)], [cut])
    found, expected = (poisoned(vector(cut.numel)) for _ in range(2))
    rows = positions[None], values[None]
    kernels.chunk_put.gpu([found], *rows, [cut], subtract=False)
    kernels.chunk_put.reference([expected], *rows, [cut], subtract=False)
    assert torch.equal(found, expected)


def test_vectors_of_several_shapes_take_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    module, names = importlib.import_module("thinwire.kernels.chunks.triton"), list[str]()
    launch = module.launch

    def counted(kernel: Any, *args: Any, **constants: Any) -> None:
        names.append(kernel.fn.__name__)
        launch(kernel, *args, **constants)

    monkeypatch.setattr(module, "launch", counted)
    cuts = [cut_as(shape, 16, "dct", 6 / 256) for shape in ((32, 64), (31, 160), (30, 7), (500,), (67,))]
    cuts += [cut_as((16, 24), 16, "hadamard"), cut_as((17, 33), 16, None)]
    xs = [vector(cut.numel).to(DEVICE) for cut in cuts]
    positions, values = kernels.chunk_topk.gpu(xs, cuts)
    expected = kernels.chunk_topk.reference(xs, cuts)[1]
    parts = (each.split([cut.count for cut in cuts]) for each in (positions, values, expected))
    for where, found, least, cut in zip(*parts, cuts, strict=True):
        assert_chosen(where, found, least, cut)
    for subtract in (False, True):
        outs, wanted = ([x.clone() for x in xs] for _ in range(2))
        kernels.chunk_put.gpu(outs, positions[None], values[None], cuts, subtract)
        kernels.chunk_put.reference(wanted, positions[None], values[None], cuts, subtract)
        assert all(map(torch.equal, outs, wanted))
    assert names == ["_topk", "_inverse", "_inverse"]


def test_chunks_that_the_kernels_leave_to_the_reference() -> None:
    wide = kernels.Chunking(3 * 5000, 5000, 1, 5000, 7, "dct")
    narrow = cut_as((33, 20), 16, "dct")
    for cut, dtype in ((wide, torch.float32), (narrow, torch.bfloat16)):
        x = framed(vector(cut.numel).to(dtype))
        (positions, values), (others, expected) = (
            each([x], [cut]) for each in (kernels.chunk_topk.gpu, kernels.chunk_topk.reference)
        )
        assert torch.equal(positions, others)
        assert torch.equal(values, expected)
        for subtract in (False, True):
            found, wanted = x.clone(), x.clone()
            kernels.chunk_put.gpu([found], positions[None], values[None], [cut], subtract)
            kernels.chunk_put.reference([wanted], positions[None], values[None], [cut], subtract)
            assert torch.equal(found, wanted)


@pytest.mark.parametrize(
    ("size", "kept", "count"),
    [
        *((size, kept, 301) for size, kept in ((1, 1), (4, 1), (5, 3), (6, 6), (9, 4), (4096, 4))),
        *((256, 6, count) for count in (0, 1, 301)),
        (64, 32, 40),
        (85, 26, 40),
    ],
)
@pytest.mark.first(5)
def test_subsets(size: int, kept: int, count: int) -> None:
    numbering = kernels.Numbering(0, size, kept)
    generator = torch.Generator().manual_seed(size)
    chosen = [torch.randperm(size, generator=generator)[:kept].sort().values for _ in range(count)]
    if count > 1:
        chosen[0], chosen[-1] = torch.arange(kept), torch.arange(size - kept, size)
    positions = framed(torch.cat([torch.empty(0, dtype=torch.int16), *(each.short() for each in chosen)]))
    positions, runs = positions.repeat(3, 1), (kernels.Numbered(numbering, 3, count),)
    rows = kernels.subsets_encode.gpu(positions.view(-1), runs).view(3, -1)
    assert torch.equal(rows.view(-1), kernels.subsets_encode.reference(positions.view(-1), runs))
    found = kernels.subsets_decode.gpu(rows, count, numbering)
    assert torch.equal(found, positions)
    longer = torch.nn.functional.pad(rows, (0, 2))
    assert torch.equal(kernels.subsets_decode.gpu(longer, count, numbering), found)


def test_bytes_that_number_no_subset() -> None:
    numbering = kernels.Numbering(0, 10, 2)  # 45 subsets, 6 bits each: 18 bits in 3 bytes
    rows = torch.tensor([[0, 0, 0], [44, 0, 0], [45, 0, 0], [0, 0xC0, 2], [0, 0xD0, 2], [0, 0, 4]], dtype=torch.uint8)
    found = kernels.subsets_decode.gpu(rows.to(DEVICE), 3, numbering)
    found[(found < 0).any(1)] = -1  # those of one number may be enough
    assert torch.equal(found, kernels.subsets_decode.reference(rows.to(DEVICE), 3, numbering))
    assert (found[:, 0] == -1).tolist() == [False, False, True, False, True, True]


@pytest.mark.parametrize(
    ("values", "density"),
    [
        pytest.param(None, 60 / 256, marks=pytest.mark.slow),
        (torch.bfloat16, 6 / 256),
        (Sign(), 6 / 256),
        (OffsetFloat.balanced(bits=8), 6 / 256),
    ],
    ids=str,
)
def test_chunks_on_their_way(values: Narrow, density: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sender never waits for the device, and what arrives is what was sent."""
    codec, x = ChunkTopK(density=density, values=values), framed(vector(24 * 64))
    expected = codec.encode(x.cpu().view(24, 64))
    both = 2 * expected.dense().view(-1)
    monkeypatch.setattr(dispatch.Kernel, "backend", lambda *_, **__: "gpu")
    monkeypatch.setattr(indices, "on_host", lambda _: False)
    codec.encode(x.view(24, 64)).to_buffer()  # matrices, tables and headers are copied to the device once
    with waiting_forbidden(monkeypatch):
        payload = codec.encode(x.view(24, 64))
        buffer = payload.to_buffer()
    assert isinstance(payload, Chunks)
    assert isinstance(expected, Chunks)
    assert torch.equal(payload.positions.cpu(), expected.positions)
    torch.testing.assert_close(payload.values.cpu(), expected.values, rtol=1e-5, atol=1e-5)
    summed, twice = payload.from_buffers(torch.stack([buffer, buffer])), type(payload).concat([payload, payload])
    out, wanted = poisoned(x), poisoned(x)
    summed.write(out)
    twice.write(wanted)
    assert torch.equal(out, wanted)
    torch.testing.assert_close(out.cpu(), both, rtol=1e-4, atol=1e-4)
    rest = framed(out.cpu())
    summed.subtract_from([rest])
    assert not rest.any()


def test_numbers_are_read_into_vectors_that_lie_apart() -> None:
    runs, x = (300, 1, 4000), vector(4301).to(DEVICE)
    coded = Coded.of_each(Parts(x, cut_of_runs(runs)), Levels(), seeds=[1, 2, 3])
    mine = Dense(values=coded.values(torch.float32), coded=coded)
    rows = numbers.Rows(torch.stack([mine.to_buffer()] * 2), mine._header, mine.values, coded)
    for cut in (Cut([5, 400, 500], runs), Cut([0, 300, 301], runs), Cut([5, 605], (400, 3901))):
        found, expected = (framed(vector(4301 + 300 * (cut.offsets[0] > 0))) for _ in range(2))
        flags = torch.ones(1, dtype=torch.bool, device=DEVICE)
        kernels.numbers_read.gpu(*rows._arrived(), True, Parts(found, cut), flags)
        kernels.numbers_read.reference(*rows._arrived(), True, Parts(expected, cut))
        assert torch.equal(found, expected)
        assert not flags
        assert intact(found)


@pytest.mark.parametrize(
    "form", [Sign(), Sign(group_size=100), Levels(), Ternary(clip=2.5), OffsetFloat.balanced(rounding="stochastic")]
)
def test_codes_of_several_vectors_in_one_launch(form: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch.Kernel, "backend", lambda *_, **__: "gpu")
    xs, seeds = [framed(vector(n, seed=n)) for n in (2000, 63, 0, 1, 5000)], [2**33 + 1, 2, 3, 4, 5]
    together = Coded.of_each(Parts(torch.cat(xs), cut_of_runs((2000, 63, 0, 1, 5000))), form, seeds=seeds)
    apart = torch.cat([torch.nn.functional.pad(x, (3, 4), value=torch.nan) for x in xs])
    out = poisoned(torch.cat(xs))
    places = Cut([3, 2010, 2080, 2087, 2095], together.runs)
    found = Coded.of_each(Parts(apart, places), form, seeds=seeds, out=out)
    assert torch.equal(found.codes, together.codes)
    assert torch.equal(found.scales, together.scales)
    assert torch.equal(out, together.values(torch.float32))
    alone = [Coded.of(x, form, seed=seed) for x, seed in zip(xs, seeds, strict=True)]
    assert torch.equal(together.codes, torch.cat([part.codes for part in alone]))
    assert torch.equal(together.scales, torch.cat([part.scales for part in alone]))
    assert torch.equal(together.values(torch.float32), torch.cat([part.values(torch.float32) for part in alone]))


ABOVE = {
    "accumulate_hashed_slots",
    "accumulate_largest_of_each",
    "accumulate_sampled_select",
    "accumulate_select",
    "codes_encode",
    "largest",
    "largest_in_rows",
    "largest_of_each",
    "select",
    "sketch_insert",
    "sketch_query",
    "subsets_decode",
}
"""Which tests of their own hold against the reference on more contents."""
LONG = {"chunk_settle", "exponents_decode", "numbers_read", "scaled_encode", "settle", "subsets_read"}
"""Which take the interpreter long."""
CHECKED = [pytest.param(name, marks=[pytest.mark.slow] * (name in ABOVE | LONG)) for name in sorted(CASES)]


@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")  # the interpreter's
@pytest.mark.parametrize("name", CHECKED)
def test_what_a_machine_is_checked_for(name: str) -> None:
    kernel, case = getattr(kernels, name), CASES[name]
    for numel, content in ((1, "zeros"), (63, "whole"), (5000, "normal"), (200, "odd")):
        if content in case.contents:
            for trial in case.make(Kit(DEVICE, torch.float32, content), numel):
                found, expected = (trial.run(call, DEVICE) for call in (kernel.gpu, kernel.reference))
                near = case.near_on_gpu or case.near
                assert not (case.alike(trial, found, expected) if case.alike else difference(found, expected, near))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_the_largest_of_each_in_other_precisions(dtype: torch.dtype) -> None:
    xs = [framed(vector(n, dtype=torch.float64).to(dtype)) for n in (300, 1, 4097)]
    for counts in ((30, 1, 40), (300, 0, 4097)):
        found, expected = (
            call(xs, counts) for call in (kernels.largest_of_each.gpu, kernels.largest_of_each.reference)
        )
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.grid
@pytest.mark.parametrize("few", [1 << 25, 5000])
@pytest.mark.parametrize("share", [0.02, 0.4, 0.8, 1.0])
def test_of_equal_magnitudes_the_lowest_indices_come_first(
    share: float, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selecting, "_FEW", few)  # beyond it, a program takes several tiles
    monkeypatch.setattr(selecting, "PROGRAMS", 3)
    generator = torch.Generator().manual_seed(1)
    magnitudes = torch.tensor([0.0, 0.5, 0.5, 1.0, 1.0, 1.0, 2.0])  # at every share, ties lie on both sides of the cut
    tiles = (1, 3, 2)
    xs = []
    for count in tiles:
        numel = count * shared.TILE - 5
        x = magnitudes[torch.randint(len(magnitudes), (numel,), generator=generator)]
        xs.append(framed(torch.where(torch.rand(numel, generator=generator) < 0.5, x, -x)))
    counts = [round(share * x.numel()) for x in xs]
    found, expected = (call(xs, counts) for call in (kernels.largest_of_each.gpu, kernels.largest_of_each.reference))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    for chosen, x, k in zip(found[0].split(counts), xs, counts, strict=True):
        order = sorted(range(x.numel()), key=lambda i: (-abs(float(x[i])), i))
        assert chosen.tolist() == sorted(order[:k])


SMALL_SAMPLES = pytest.mark.parametrize("small", [1 << 14, 0])


@pytest.mark.grid
@SMALL_SAMPLES
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_more_picks_than_are_wanted_and_more_than_there_is_room_for(
    dtype: torch.dtype, small: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "_SMALL", small)
    xs = [vector(n, dtype=torch.float64).mul(4).round().to(dtype) for n in (9000, 1, 0, 300)]
    given = [framed(x) for x in xs]
    for rank, capacity in ((1, 700), (5, 20), (30, 5), (2, 0)):
        draws = [
            kernels.Draw(0, min(97, max(1, len(x))), min(rank, -(-len(x) // 97)), min(capacity, len(x))) for x in xs
        ]
        outs = [[poisoned(x) for x in xs] for _ in range(2)]
        calls = kernels.accumulate_sampled_select.gpu, kernels.accumulate_sampled_select.reference
        found, expected = (
            call(Sum(out, given, given, [0.5] * len(xs)), draws) for call, out in zip(calls, outs, strict=True)
        )
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        assert intact(*outs[0])


def _backwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the interpreter run the last program first."""
    builder = importlib.import_module("triton.runtime.interpreter").interpreter_builder
    plain = builder.set_grid_idx
    monkeypatch.setattr(builder, "set_grid_idx", lambda x, y, z: plain(builder.grid_dim[0] - 1 - x, y, z))


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("kind", ["normal", "nearly all zero", "a sample that misleads", "more than there is room for"])
def test_the_largest_sums_where_a_sample_promises_too_few_or_too_many(
    kind: str, backwards: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if backwards and DEVICE.type == "cpu":
        _backwards(monkeypatch)
    xs = [vector(n) for n in (9000, 20_000, 1, 0)]
    counts = [60, 1700, 1, 0]
    for x, k in zip(xs[:2], counts, strict=False):
        stride = sampling._surely(x.numel(), k, 0).stride
        if kind == "nearly all zero":
            x[: k // 2] = x[k:] = 0
            x[-1] = 5
        elif kind == "a sample that misleads":
            x[::stride] += 9
            counts = [200, 1700, 1, 0]
        elif kind == "more than there is room for":
            x[::stride] = 0
    sums = [Sum([poisoned(x) for x in xs], [framed(x) for x in xs], [framed(x) for x in xs], [0.5] * 4) for _ in "ab"]
    calls = kernels.accumulate_largest_of_each.gpu, kernels.accumulate_largest_of_each.reference
    found, expected = (call(each, counts, [0, 9000, 29_000, 0]) for call, each in zip(calls, sums, strict=True))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_values_that_become_0_when_they_are_written_do_not_count() -> None:
    x = vector(5000) * torch.where(vector(5000, seed=1) > 1.5, 1.0, 1e-12)  # some 330 are large
    sums = Sum([poisoned(x)], [framed(x)], [framed(x)], [0.5])
    draws, fit = [kernels.Draw(0, 1, 900, 900)], Fit(torch.float16)
    calls = (
        partial(kernels.accumulate_largest_of_each.gpu, sums, [900], [0], fit),
        partial(kernels.accumulate_sampled_select.gpu, sums, draws, fit),
        partial(kernels.accumulate_hashed_slots.gpu, sums, draws, [500], [1], [(0, 5000)], fit),
    )
    for found in (call() for call in calls):
        assert found.values.dtype == torch.float16
        assert found.carried is not None
        assert 0 < int(found.carried) == int(found.values.count_nonzero()) < 400


def test_ties_that_do_not_fit_are_written_nowhere() -> None:
    xs = [framed(torch.ones(40)), framed(torch.ones(30))]
    counts, starts = [5, 3], [3, 0]  # what the second writes past its end would be the first one's
    at, size, wanted, begin = shared.table(DEVICE, shared.addresses(xs), [40, 30], counts, starts)
    indices, values = (torch.full((10,), -7, dtype=dtype, device=DEVICE) for dtype in (torch.int32, torch.float32))
    selecting.write_largest(xs, at, size, wanted, begin, (indices, values))
    assert indices.tolist() == [0, 1, 2, 0, 1, 2, 3, 4, -7, -7]
    assert values.tolist() == [1.0] * 8 + [-7.0] * 2


@SMALL_SAMPLES
def test_a_nan_in_the_sample_leaves_nothing_but_what_is_not_finite(small: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "_SMALL", small)
    residuals, gradients = ([framed(vector(300, seed)) for seed in seeds] for seeds in ((1, 2), (3, 4)))
    gradients[1][8], gradients[1][20] = torch.nan, torch.inf
    draws = [kernels.Draw(offset=2, stride=3, rank=5, capacity=50)] * 2
    found, expected = (
        call(Sum([poisoned(x) for x in residuals], residuals, gradients, [0.5, 0.5]), draws)
        for call in (kernels.accumulate_sampled_select.gpu, kernels.accumulate_sampled_select.reference)
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    assert found[0][50:53].tolist() == [8, 20, -1]


def test_the_largest_of_one_vector_and_of_several() -> None:
    xs = [framed(vector(n, seed=n)) for n in (50, 5000, 500)]
    for some in ([xs[1]], xs):
        counts = [len(x) // 10 for x in some]
        found, expected = (
            call(some, counts) for call in (kernels.largest_of_each.gpu, kernels.largest_of_each.reference)
        )
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.grid
@pytest.mark.parametrize(
    ("count", "space"), [(0, 9), (1, 1), (3, 5), (40, 41), (63, 5000), (700, (1 << 31) - 8), (900, 1000), (4700, 7000)]
)
@pytest.mark.parametrize("alone", [64, 0])
def test_elias_fano(count: int, space: int, alone: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "_ALONE", alone)
    generator = torch.Generator().manual_seed(count)
    rows = [torch.randint(space, (count,), generator=generator).sort().values.to(torch.int32) for _ in range(2)]
    for row in rows:
        assert torch.equal(
            kernels.elias_fano_encode.gpu(row.to(DEVICE), space).cpu(), kernels.elias_fano_encode.reference(row, space)
        )
    whole = torch.stack([kernels.elias_fano_encode.reference(row, space) for row in rows])
    for place in range(min(12, 8 * whole.shape[1])):  # a bit in one row is wrong; at first none
        damaged = whole.clone()
        if place:
            bit = (place * 8 * whole.shape[1]) // 12
            damaged[1, bit // 8] ^= 1 << bit % 8
        found = kernels.elias_fano_decode.gpu(framed(damaged.view(-1)).view_as(damaged), count, space).cpu()
        found[(found < 0).any(1)] = -1  # one may be enough
        assert torch.equal(found, kernels.elias_fano_decode.reference(damaged, count, space))


@pytest.mark.parametrize("numel", [0, 513])
def test_exponents(numel: int) -> None:
    x = vector(numel).bfloat16().view(torch.int16)
    counts = kernels.exponents_count.reference(x).tolist()
    lengths = exponents.code_lengths(counts)
    pairs = zip(exponents.prefix_codes(lengths), lengths, strict=True)
    codes = torch.tensor([code | length << 16 for code, length in pairs], dtype=torch.int32)
    room = sum(a * b for a, b in zip(counts, lengths, strict=True)) // 8 + -(-numel // CODED)
    rest, sizes, stream = parts = kernels.exponents_encode.reference(x, codes, room)
    for found, due in zip(kernels.exponents_encode.gpu(framed(x), codes.to(DEVICE), room), parts, strict=True):
        assert torch.equal(found.cpu(), due)
    table = framed(exponents.table_of(lengths)) if numel else framed(torch.zeros(1 << 12, dtype=torch.int16))
    for place in range(2):  # a bit of the blocks, or of their sizes, is wrong; at first none
        if place and numel:
            damaged = (stream, sizes.view(torch.uint8))[place % 2]
            damaged[place * 37 % damaged.numel()] ^= 1 << place
        outs = framed(x), torch.zeros_like(x)
        good = kernels.exponents_decode.gpu(outs[0], framed(rest), framed(sizes), framed(stream), table)
        due = kernels.exponents_decode.reference(outs[1], rest, sizes, stream, table.cpu())
        assert bool(good) == bool(due)
        assert not due or torch.equal(outs[0].cpu(), outs[1])
        assert place or bool(due)


def test_where_plain_torch_is_as_good() -> None:
    every = {name: kernel for name, kernel in vars(kernels).items() if isinstance(kernel, Kernel)}
    assert {name for name, kernel in every.items() if kernel.cpu is kernel.reference} == {
        "accumulate_hashed_slots",
        "accumulate_largest_of_each",
        "chunk_settle",
        "clamped",
        "elias_fano_read",
        "gather_each",
        "joined",
        "sections_write",
        "settle",
        "slots_read",
        "subsets_read",
    }
    plain = {"exponents_count", "merge", "ones", "slots_decode"}
    assert {name for name, kernel in every.items() if kernel.gpu is kernel.reference} == plain


@pytest.mark.slow
def test_nothing_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y, out, velocity = (framed(vector(5000, seed=seed)) for seed in range(4))
    indices, runs = payload(2, 2, 1000, 20)
    indices, values, threshold = framed(indices), framed(vector(80)), x.new_ones(())
    regions = ((100, 1000), (1100, 1000))
    cut, numbering = cut_as((50, 100), 16, "dct", 6 / 250), kernels.Numbering(0, 250, 6)
    kernels.scatter.gpu(out, regions, indices, values, runs)  # layouts are copied to the device once
    cut.axes(x), table_of(numbering, x.device)
    with waiting_forbidden(monkeypatch):
        kernels.select.gpu(x, threshold, 10)
        kernels.accumulate_select.gpu(Sum([out], [x], [y], [0.5]), threshold, 5000)
        moving = Sum([out], [x], [y], [0.5], None, [velocity], [y], 0.9, True)
        kernels.accumulate_select.gpu(moving, threshold, 10)
        picks = kernels.largest.gpu(x, 50)
        kernels.scatter.gpu(out, regions, indices, values, runs)
        kernels.scatter_add.gpu([out], [0], indices, values, runs, -1.0)
        kernels.scatter_add.gpu((), [0], indices, values, [80], masked=[out])
        kernels.hashed_slots_of_each.gpu([x], picks, values[:50], [50], [20], [1], [(0, 5000)])
        kernels.largest_of_each.gpu([x, y], [5, 50])
        draws = [kernels.Draw(offset=1, stride=7, rank=9, capacity=40)] * 2
        kernels.accumulate_sampled_select.gpu(Sum([out, velocity], [x, y], [y, x], [0.5, 0.5]), draws)
        kernels.scatter_add.gpu([out, x], [0, 0], picks, values[:50], [20, 30], -1.0)
        kernels.elias_fano_decode.gpu(kernels.elias_fano_encode.gpu(picks, 5000)[None], 50, 5000)
        kernels.largest_blocks.gpu(x, 5, 30)
        kernels.largest_in_rows.gpu(x, 50, 7)
        kernels.unpack_bits.gpu(kernels.pack_bits.gpu(picks, 5), 50, 5)
        kernels.sketch_query.gpu(kernels.sketch_insert.gpu(x, 3, 50, 1), 5000, 1)
        chosen = kernels.chunk_topk.gpu([x], [cut])
        for subtract in (False, True):
            kernels.chunk_put.gpu([out], chosen[0][None], chosen[1][None], [cut], subtract)
        named = kernels.subsets_encode.gpu(chosen[0], (kernels.Numbered(numbering, 1, cut.chunks),))
        kernels.subsets_decode.gpu(named[None], cut.chunks, numbering)


@pytest.mark.slow
def test_twice_the_same() -> None:
    x = framed(vector(SEVERAL_TILES))
    for call in (
        lambda: kernels.select.gpu(x, x.new_ones(()), 100).indices,
        lambda: kernels.sketch_insert.gpu(x, 2, 50, 1),
        lambda: kernels.chunk_topk.gpu([x], [cut_as((8209,), 16, "dct")])[1],
    ):
        assert torch.equal(call(), call())


@pytest.mark.slow
def test_the_package_is_imported_without_triton() -> None:
    script = "import sys; sys.modules['triton'] = None; import thinwire, thinwire.kernels"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_gpu_without_triton_gets_plain_torch_and_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "thinwire.kernels.triton", raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)
    triton_is_there.cache_clear()
    fresh = [Kernel(kernel.reference, by="x") for kernel in (kernels.largest_in_rows, kernels.block_energies)]
    with pytest.warns(UserWarning, match="plain torch") as told:
        assert [kernel.gpu for kernel in fresh] == [kernel.reference for kernel in fresh]
    assert len(told) == 1
    triton_is_there.cache_clear()


def test_backend_by_device_dtype_and_layout() -> None:
    x = torch.ones(10, device=DEVICE)
    if DEVICE.type == "cuda":
        assert kernels.peak_of_each.backend([x, x.double(), x.bfloat16()]) == "gpu"
        assert kernels.pack_bits.backend(x.short(), 1) == "gpu"
        assert kernels.peak_of_each.backend([x, x.cpu()]) == "reference"
    assert kernels.select.backend(x[::2], x[0], 1) == "reference"
    assert kernels.pack_bits.backend(x.short()[::2], 1) == "reference"

"""The Triton kernels do what the reference does: on a GPU, or without one in Triton's interpreter."""

import importlib.util
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch
from cases import vector
from torch import Tensor

from thinwire import kernels
from thinwire.kernels import reference

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

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
inputs = pytest.mark.parametrize("make", INPUTS.values(), ids=INPUTS)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


@pytest.fixture(scope="module")
def gpu() -> ModuleType:
    """The backend."""
    return importlib.import_module("thinwire.kernels.triton")


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


@inputs
@dtypes
def test_select(gpu: ModuleType, make: Callable[[torch.dtype], Tensor], dtype: torch.dtype) -> None:
    x = framed(make(dtype))
    half, zero, nan, n = threshold_of(x, 0.5), x.new_zeros(()), x.new_full((), torch.nan), x.numel()
    for threshold, capacity in ((threshold_of(x, 0.99), n + 5), (half, n), (half, 10), (half, 0), (zero, 1), (nan, 3)):
        same_picks(gpu.select(x, threshold, capacity), reference.select(x, threshold, capacity), capacity)


@inputs
@dtypes
def test_largest(gpu: ModuleType, make: Callable[[torch.dtype], Tensor], dtype: torch.dtype) -> None:
    x = framed(make(dtype))
    for k in {0, x.numel() // 100, x.numel() // 2, x.numel()}:
        assert torch.equal(gpu.largest(x, k), reference.largest(x, k))


@inputs
@dtypes
def test_accumulate_select(gpu: ModuleType, make: Callable[[torch.dtype], Tensor], dtype: torch.dtype) -> None:
    gradient, residual = framed(make(dtype)), framed(vector(make(dtype).numel(), seed=1, dtype=dtype))
    out, expected = poisoned(gradient), torch.empty_like(gradient)
    args = (residual, gradient, 1 / 3)
    found = gpu.accumulate_select(out, *args, gradient.new_ones(()), gradient.numel())
    reference.accumulate(expected, *args)
    torch.testing.assert_close(out, expected, equal_nan=True)
    same_picks(found, reference.select(out, gradient.new_ones(()), gradient.numel()), gradient.numel())
    assert intact(out, residual, gradient)


@inputs
@dtypes
@pytest.mark.parametrize("nesterov", [False, True])
def test_accumulate_momentum(
    gpu: ModuleType, make: Callable[[torch.dtype], Tensor], dtype: torch.dtype, nesterov: bool
) -> None:
    gradient = framed(make(dtype))
    residual, velocity = (framed(vector(gradient.numel(), seed=seed, dtype=dtype)) for seed in (1, 2))
    args: tuple[Any, ...] = (residual, velocity, gradient, 0.3, 0.7, nesterov)
    expected = poisoned(gradient), poisoned(gradient)
    reference.accumulate_momentum(*expected, *args)
    plain, selected = ((poisoned(gradient), poisoned(gradient)) for _ in range(2))
    gpu.accumulate_momentum(*plain, *args)
    found = gpu.accumulate_momentum_select(*selected, *args, gradient.new_ones(()), 10)
    torch.testing.assert_close(plain, expected, equal_nan=True)
    torch.testing.assert_close(selected, plain, equal_nan=True, rtol=0, atol=0)
    same_picks(found, reference.select(plain[0], gradient.new_ones(()), 10), 10)
    assert intact(*plain, *selected)


def test_a_scale_that_is_not_finite_picks_nothing_outside(gpu: ModuleType) -> None:
    gradient = framed(vector(63))
    found = gpu.accumulate_select(poisoned(gradient), gradient, gradient, torch.nan, gradient.new_ones(()), 100)
    assert found.indices.tolist() == [*range(63), *[-1] * 37]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("numel", [0, 1, 63, SEVERAL_TILES])
def test_accumulate_rounded(gpu: ModuleType, numel: int, dtype: torch.dtype) -> None:
    gradient, residual = framed(vector(numel).to(dtype)), framed(vector(numel, seed=1).bfloat16())
    gradient[1:3] = torch.tensor([torch.nan, torch.inf])[: max(0, numel - 1)]
    plain, selected, expected = (poisoned(residual) for _ in range(3))
    args = (residual, gradient, 0.25, 77)
    gpu.accumulate_rounded(plain, *args)
    found = gpu.accumulate_rounded_select(selected, *args, gradient.new_ones(()), 10)
    reference.accumulate_rounded(expected, *args)
    torch.testing.assert_close(plain, expected, equal_nan=True, rtol=2**-7, atol=0)
    assert int((plain.nan_to_num() != expected.nan_to_num()).sum()) <= numel // 1000, "a fused multiply-add may differ"
    torch.testing.assert_close(selected, plain, equal_nan=True, rtol=0, atol=0)
    same_picks(found, reference.select(plain, gradient.new_ones(()), 10), 10)
    assert intact(plain, selected)


def payload(ranks: int, spans: int, length: int, per_run: int, seed: int = 0) -> tuple[Tensor, tuple[int, ...]]:
    """Return indices as of so many payloads behind one another, each ascending over the spans from 100 on."""
    generator = torch.Generator().manual_seed(seed)
    runs = [
        torch.randperm(length, generator=generator)[:per_run].sort().values + 100 + span * length
        for _ in range(ranks)
        for span in range(spans)
    ]
    return torch.cat(runs).int(), tuple(run.numel() for run in runs)


@dtypes
@pytest.mark.parametrize(
    ("ranks", "spans", "length", "per_run"),
    [(1, 1, 63, 10), (3, 1, 40_000, 900), (2, 3, 1000, 999), (4, 2, 20_000, 31), (2, 2, 100, 0), (0, 1, 100, 0)],
)
def test_scatter(gpu: ModuleType, ranks: int, spans: int, length: int, per_run: int, dtype: torch.dtype) -> None:
    indices, runs = payload(ranks, spans, length, per_run) if ranks else (torch.empty(0, dtype=torch.int32), ())
    values = framed(vector(indices.numel(), dtype=dtype))
    where = [(100 + span * length, length) for span in range(spans)]
    ascending = framed(indices)
    shuffled = framed(torch.cat([run.flip(0) for run in indices.split(list(runs))]) if ranks else indices)
    for places in (ascending, shuffled):
        for stretches in (runs, (sum(runs),)) if ranks == 1 else (runs,):
            found = framed(vector(length * spans + 200, dtype=dtype))
            expected = found.clone()
            gpu.scatter(found, where, places, values, stretches)
            reference.scatter(expected, where, places, values, stretches)
            assert torch.equal(found, expected)
            gpu.scatter_add(found, places, values, stretches, -1.0)
            reference.scatter_add(expected, places, values, stretches, -1.0)
            assert torch.equal(found, expected)
            assert intact(found)


def test_scatter_to_spans_apart_with_padding_and_nan(gpu: ModuleType) -> None:
    spans = ((700, 300), (0, 100), (100, 50))
    indices = framed(torch.tensor([3, 99, 99, 149, 701, 999, 999, 5, 99, 99, 149, 703, 703, 999], dtype=torch.int32))
    values = framed(torch.tensor([1.0, 2, 0, torch.nan, 5, 6, 0, 7, 8, 0, 9, 10, 0, torch.inf]))
    for runs in ((3, 1, 3, 3, 1, 3), (7, 7)):
        found = framed(torch.full((1100,), 4.0))
        expected = found.clone()
        gpu.scatter(found, spans, indices, values, runs)
        reference.scatter(expected, spans, indices, values, runs)
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
        assert intact(found)


@dtypes
def test_scatter_adds_in_the_order_of_the_runs(gpu: ModuleType, dtype: torch.dtype) -> None:
    big = 1e8 if dtype == torch.float32 else 1e17
    values, indices = torch.tensor([1.0, big, -big], dtype=dtype, device=DEVICE), torch.full((3,), 7, device=DEVICE)
    for runs in ((1, 1, 1), (1, 0, 1, 0, 1)):
        for call in (gpu.scatter, reference.scatter):
            out = torch.ones(10, dtype=dtype, device=DEVICE)
            call(out, ((0, 10),), indices.int(), values, runs)
            assert out.tolist() == [0.0] * 10, "(1 + big) - big"


@dtypes
@pytest.mark.parametrize("numel", [0, 1, 63, 3000])
def test_mask(gpu: ModuleType, numel: int, dtype: torch.dtype) -> None:
    indices = framed(torch.randperm(3000, generator=torch.Generator().manual_seed(0))[:numel].int())
    values = framed(vector(numel, dtype=dtype).round().index_fill(0, torch.arange(min(1, numel)), torch.nan))
    found = framed(vector(3000, dtype=dtype))
    expected = found.clone()
    gpu.mask(found, indices, values)
    reference.mask(expected, indices, values)
    assert torch.equal(found, expected)
    assert intact(found)


@pytest.mark.parametrize(("slots", "numel"), [(1, 1), (7, 63), (1000, 5000), (1500, 1 << 20), (3, (1 << 31) - 1)])
@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1, 2**63])
def test_hashing(gpu: ModuleType, slots: int, numel: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed % 2**32)
    indices = framed(torch.randint(0, numel, (1500,), generator=generator, dtype=torch.int32))
    slot, quotient = gpu.slot_of(indices, slots, numel, seed)
    expected = reference.slot_of(indices, slots, numel, seed)
    assert torch.equal(slot, expected[0])
    assert torch.equal(quotient, expected[1])
    assert torch.equal(gpu.index_of(slot, quotient, slots, numel, seed), indices)
    pairs = torch.arange(slots, device=DEVICE), torch.full((slots,), -(-numel // slots) - 1, device=DEVICE)
    assert torch.equal(gpu.index_of(*pairs, slots, numel, seed), reference.index_of(*pairs, slots, numel, seed))
    assert torch.equal(gpu.mix(indices, seed), reference.mix(indices, seed))


def test_hashing_of_nothing(gpu: ModuleType) -> None:
    nothing = torch.empty(0, dtype=torch.int32, device=DEVICE)
    assert gpu.hashed_slots(nothing, nothing, 0, 0, 1).numel() == 0
    slot, quotient = gpu.slot_of(nothing, 0, 0, 1)
    assert gpu.index_of(slot, quotient, 0, 0, 1).numel() == 0


@pytest.mark.parametrize("slots", [1, 1000, 3000])
@pytest.mark.parametrize("numel", [0, 1, 1500])
def test_hashed_slots(gpu: ModuleType, slots: int, numel: int) -> None:
    generator = torch.Generator().manual_seed(numel)
    indices = torch.randperm(50_000, generator=generator)[:numel].int()
    indices[5::7] = -1
    for most in (1, 3, 2**31 - 1):
        priorities = torch.randint(0, most, (numel,), generator=generator, dtype=torch.int32)
        args = (framed(indices), framed(priorities), slots, 50_000, 5)
        assert torch.equal(gpu.hashed_slots(*args), reference.hashed_slots(*args))


@inputs
@dtypes
@pytest.mark.parametrize("width", [5, 3000])
def test_block_energies(gpu: ModuleType, make: Callable[[torch.dtype], Tensor], dtype: torch.dtype, width: int) -> None:
    x = framed(make(dtype))
    found, expected = gpu.block_energies(x, width), reference.block_energies(x, width)
    torch.testing.assert_close(found, expected, equal_nan=True)
    k = found.numel() // 3
    assert torch.equal(gpu.largest_blocks(x, width, k), reference.largest(found, k))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "width"), [(0, 1), (0, 7), (1, 1), (5, 1), (2, 63), (3, 64), (2, 3000)])
def test_largest_in_rows(gpu: ModuleType, rows: int, width: int, dtype: torch.dtype) -> None:
    smooth = vector(rows * width).to(dtype)
    odd = smooth.clone()
    odd[width // 2 :: width], odd[-2:] = -torch.nan, torch.inf
    for content in (smooth, smooth.round(), torch.zeros_like(smooth), odd):
        x = framed(content)
        for k in {0, 1, width // 3, width}:
            found = gpu.largest_in_rows(x, width, k)
            assert found.dtype == torch.int32
            assert torch.equal(found, reference.largest_in_rows(x, width, k))
        assert intact(x)


def test_rows_too_wide_for_a_program(gpu: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    x = framed(vector(SEVERAL_TILES // 3 * 3).round())
    expected = reference.largest_in_rows(x, x.numel() // 3, 100)
    assert torch.equal(gpu.largest_in_rows(x, x.numel() // 3, 100), expected)
    monkeypatch.setattr(importlib.import_module("thinwire.kernels.triton.rows"), "_WIDEST", 1000)
    assert torch.equal(gpu.largest_in_rows(x, x.numel() // 3, 100), expected)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
@pytest.mark.parametrize("numel", [0, 1, 7, 31, 3000])
def test_bits(gpu: ModuleType, numel: int, dtype: torch.dtype) -> None:
    info = torch.iinfo(dtype)
    for bits in range(1, {torch.uint8: 9, torch.int16: 16, torch.int32: 32}[dtype]):
        codes = framed(
            torch.randint(info.min, info.max, (numel,), generator=torch.Generator().manual_seed(bits), dtype=dtype)
        )
        packed = gpu.pack_bits(codes, bits)
        assert torch.equal(packed, reference.pack_bits(codes, bits))
        longer = torch.cat([packed, packed.new_full((9,), 255)])
        for buffer in (framed(packed), framed(longer)):
            found = gpu.unpack_bits(buffer, numel, bits, dtype)
            assert torch.equal(found, reference.unpack_bits(packed, numel, bits, dtype))


@pytest.mark.parametrize("group", [7, 5000])
@pytest.mark.parametrize("code", [torch.uint8, torch.int16])
@pytest.mark.parametrize("make", [INPUTS[name] for name in ("empty", "one", "several tiles", "zeros", "one NaN")])
def test_codes(gpu: ModuleType, make: Callable[[torch.dtype], Tensor], code: torch.dtype, group: int) -> None:
    x = framed(make(torch.float32))
    norms = reference.group_norms(x, group, torch.inf).float()
    norms = torch.where(norms.isfinite() & (norms > 0), norms, torch.where(norms == 0, 1.0, torch.nan))
    powers, table = torch.exp2(norms.log2().ceil()), framed(vector(64))
    for grid in (reference.OffsetGrid(20, 0x3E0, 33, 33), reference.OffsetGrid(23, 0x78, 10, 5)):
        for rounding in ("truncate", "nearest", "stochastic"):
            args = (x, framed(powers), group, grid, rounding, 2**63 + 5)
            same_codes(gpu.offset_encode, reference.offset_encode, code, table, *args)
    same_codes(gpu.levels_encode, reference.levels_encode, code, table, x, framed(norms), group, 7, 11)
    same_codes(gpu.ternary_encode, reference.ternary_encode, code, table, x, framed(norms), group, 3)
    same_codes(gpu.sign_encode, reference.sign_encode, code, table, x)
    assert gpu.group_norms is reference.group_norms


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
            importlib.import_module("thinwire.kernels.triton").table_decode(out, codes, table, *rest[:2])
            reference.table_decode(wanted, codes, table, *rest[:2])
            torch.testing.assert_close(out, wanted, rtol=0, atol=0, equal_nan=True)
            assert intact(out)


@pytest.mark.parametrize("make", [INPUTS[name] for name in ("empty", "one", "1000", "zeros", "one NaN", "one Inf")])
@dtypes
@pytest.mark.parametrize(("rows", "buckets"), [(1, 7), (4, 300)])
def test_sketch(
    gpu: ModuleType, make: Callable[[torch.dtype], Tensor], dtype: torch.dtype, rows: int, buckets: int
) -> None:
    x = framed(make(dtype))
    table = gpu.sketch_insert(x, rows, buckets, 2**40)
    torch.testing.assert_close(
        table, reference.sketch_insert(x, rows, buckets, 2**40), equal_nan=True, atol=1e-4, rtol=1e-5
    )
    table = framed(table.view(-1)).view(rows, buckets)
    found, expected = (module.sketch_query(table, x.numel(), 2**40) for module in (gpu, reference))
    torch.testing.assert_close(found, expected, equal_nan=True, rtol=0, atol=0)


@dtypes
def test_factors_and_spectra(gpu: ModuleType, dtype: torch.dtype) -> None:
    """The device's libraries, which round in other places than the reference."""
    a, b = (framed(vector(n * 4, seed=n, dtype=dtype)).view(n, 4) for n in (300, 70))
    out = poisoned(vector(300 * 70, dtype=dtype))
    gpu.outer_sums(out.view(300, 70), gpu.orthonormal(a), b)
    expected = torch.empty_like(out).view(300, 70)
    reference.outer_sums(expected, reference.orthonormal(a), b)
    torch.testing.assert_close(out.view(300, 70), expected, atol=1e-5, rtol=1e-4)
    assert intact(out)
    pairs = framed(vector(5 * 129 * 2, dtype=dtype)).view(-1, 2)
    found, expected = (module.inverse_fourier(pairs, 1200, 256) for module in (gpu, reference))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    assert gpu.row_sums is reference.row_sums


def test_a_sketch_of_several_parts(gpu: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    x = framed(vector(1000))
    whole = gpu.sketch_insert(x, 2, 30, 3)
    monkeypatch.setattr(importlib.import_module("thinwire.kernels.triton.sketch"), "_PART", 300)
    torch.testing.assert_close(gpu.sketch_insert(x, 2, 30, 3), whole)


def test_merge_is_the_references(gpu: ModuleType) -> None:
    assert gpu.merge is reference.merge


def test_every_kernel_of_the_reference_is_there(gpu: ModuleType) -> None:
    assert set(gpu.__all__) == set(reference.__all__)


def test_nothing_waits_for_the_device(gpu: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y, out, velocity = (framed(vector(5000, seed=seed)) for seed in range(4))
    indices, runs = payload(2, 2, 1000, 20)
    indices, values, threshold = framed(indices), framed(vector(80)), x.new_ones(())
    spans = ((100, 1000), (1100, 1000))
    gpu.scatter(out, spans, indices, values, runs)  # layouts are copied to the device once
    with waiting_forbidden(monkeypatch):
        gpu.select(x, threshold, 10)
        gpu.accumulate_select(out, x, y, 0.5, threshold, 5000)
        gpu.accumulate_momentum_select(out, velocity, x, y, y, 0.5, 0.9, True, threshold, 10)
        picks = gpu.largest(x, 50)
        gpu.scatter(out, spans, indices, values, runs)
        gpu.scatter_add(out, indices, values, runs, -1.0)
        gpu.mask(out, indices, values)
        gpu.hashed_slots(picks, picks, 20, 5000, 1)
        gpu.index_of(*gpu.slot_of(picks, 20, 5000, 1), 20, 5000, 1)
        gpu.largest_blocks(x, 5, 30)
        gpu.largest_in_rows(x, 50, 7)
        gpu.unpack_bits(gpu.pack_bits(picks, 5), 50, 5)
        gpu.sketch_query(gpu.sketch_insert(x, 3, 50, 1), 5000, 1)


def test_twice_the_same(gpu: ModuleType) -> None:
    x = framed(vector(SEVERAL_TILES))
    for call in (lambda: gpu.select(x, x.new_ones(()), 100).indices, lambda: gpu.sketch_insert(x, 2, 50, 1)):
        assert torch.equal(call(), call())


def test_the_package_is_imported_without_triton() -> None:
    script = "import sys; sys.modules['triton'] = None; import thinwire, thinwire.kernels"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_gpu_without_triton_gets_plain_torch_and_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("thinwire.kernels.triton")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "triton", None)
    kernels._gpu.cache_clear()
    with pytest.warns(UserWarning, match="plain torch"):
        assert kernels._gpu() is reference
    assert kernels._gpu() is reference
    kernels._gpu.cache_clear()


def test_backend_by_device_dtype_and_layout(gpu: ModuleType) -> None:
    x = torch.ones(10, device=DEVICE)
    if DEVICE.type == "cuda":
        assert kernels.backend(x, x.double(), x.bfloat16()) is gpu
        assert kernels.integer_backend(x.byte()) is gpu
        assert kernels.backend(x, x.cpu()) is reference
    assert kernels.backend(x[::2]) is reference
    assert kernels.integer_backend(x[::2].byte()[::2]) is reference

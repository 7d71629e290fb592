"""Chunks of a tensor: how it is cut, what their transforms compute, and how positions are numbered."""

import math
from itertools import combinations
from typing import Literal

import pytest
import torch
from cases import SUMS, joined, summed, vector
from torch import Tensor

from thinwire import codecs, kernels
from thinwire.kernels import Chunking, Numbered, Numbering, Transform
from thinwire.kernels.chunks import cpu
from thinwire.kernels.chunks.chunking import matrix
from thinwire.kernels.dispatch import Backend
from thinwire.kernels.parts import wide, wide_each
from thinwire.kernels.sums import How
from thinwire.payloads import Chunks

pytestmark = pytest.mark.usefixtures("two_threads")

BACKENDS: tuple[Backend, ...] = ("cpu", "reference")
SHAPES = [
    *((1, 1), (17, 33), (16, 16), (5, 3, 3, 3), (256, 65), (257, 7), (13, 29), (1000, 2), (1, 300), (300, 1)),
    *((700,), (7,), (1,), (0,), (0, 5), (5, 0)),
]
TRANSFORMS: tuple[Transform, ...] = ("dct", "hadamard", None)
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)
transforms = pytest.mark.parametrize("transform", TRANSFORMS, ids=str)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


def _cut(shape: tuple[int, ...], transform: Transform = "dct", density: float = 0.1, chunk: int = 16) -> Chunking:
    return Chunking.of(shape, chunk, transform, lambda size: max(1, round(density * size)))


def _plain(size: int, transform: Transform) -> list[list[float]]:
    """Return the transform as the page defines it; the signs of Hadamard's are the first row's."""
    if transform == "dct":
        scales = [math.sqrt((1 if i == 0 else 2) / size) for i in range(size)]
        return [
            [scales[i] * math.cos(math.pi * (2 * j + 1) * i / (2 * size)) for j in range(size)] for i in range(size)
        ]
    if transform is None:
        return [[float(i == j) for j in range(size)] for i in range(size)]
    signs = [math.copysign(1, float(sign)) for sign in matrix(size, transform)[0]]
    return [[signs[j] * (-1) ** (i & j).bit_count() / math.sqrt(size) for j in range(size)] for i in range(size)]


def _coefficients(x: list[float], cut: Chunking) -> list[list[float]]:
    """Return every chunk's coefficients, element by element in plain Python."""
    a, b = _plain(cut.height, cut.transform), _plain(cut.width, cut.transform)
    found = []
    for chunk in range(cut.chunks):
        origin = chunk // cut.across * cut.height * cut.columns + chunk % cut.across * cut.width
        places = [[origin + i * cut.columns + j for j in range(cut.width)] for i in range(cut.height)]
        values = [[x[at] if at < cut.numel else 0.0 for at in row] for row in places]
        half = [[math.fsum(w * v for w, v in zip(row, b[c], strict=True)) for c in range(cut.width)] for row in values]
        found.append(
            [
                math.fsum(a[r][i] * half[i][c] for i in range(cut.height))
                for r in range(cut.height)
                for c in range(cut.width)
            ]
        )
    return found


@pytest.mark.grid
@shapes
@transforms
@pytest.mark.parametrize("chunk", [2, 7, 16, 64])
def test_chunks_cover_a_tensor_and_pad_it_by_less_than_a_row_of_chunks(
    shape: tuple[int, ...], transform: Transform, chunk: int
) -> None:
    cut = _cut(shape, transform, chunk=chunk)
    assert cut.numel == math.prod(shape)
    assert cut.columns % cut.width == 0
    assert cut.numel <= cut.chunks * cut.size < cut.numel + cut.columns * cut.height + (not cut.numel)
    if cut.height > 1:
        assert cut.columns == cut.numel // shape[0]
        assert max(cut.height, cut.width) <= chunk
        assert cut.width >= 4
    else:
        assert cut.width <= 4 * chunk
    if transform == "hadamard":
        assert cut.size.bit_count() == 1


def test_how_common_shapes_are_cut() -> None:
    found = {
        shape: _cut(shape) for shape in [(768, 3072), (50257, 768), (64, 3, 7, 7), (64, 64, 3, 3), (768,), (17, 32)]
    }
    assert {shape: (cut.height, cut.width) for shape, cut in found.items()} == {
        (768, 3072): (16, 16),
        (50257, 768): (16, 16),
        (64, 3, 7, 7): (16, 7),
        (64, 64, 3, 3): (16, 16),
        (768,): (1, 64),
        (17, 32): (9, 16),  # two equal rows of chunks rather than 16 and 1
    }


@transforms
@pytest.mark.parametrize("size", [1, 2, 4, 5, 9, 16, 63, 64, 256])
def test_transforms_are_orthonormal_and_what_they_are_called(size: int, transform: Transform) -> None:
    if transform == "hadamard" and size.bit_count() > 1:
        return
    found = matrix(size, transform)
    torch.testing.assert_close(
        found, torch.tensor(_plain(size, transform)).double().view(size, size), rtol=0, atol=1e-7
    )
    torch.testing.assert_close(found @ found.T, torch.eye(size).double(), rtol=0, atol=1e-13)


def test_hadamards_signs_are_mixed() -> None:
    for size in (16, 64):
        signs = matrix(size, "hadamard")[0].sign()
        assert abs(float(signs.sum())) <= size / 2
    assert not torch.equal(matrix(64, "hadamard")[0, :16].sign(), matrix(16, "hadamard")[0].sign())


@pytest.mark.grid
@shapes
@transforms
@pytest.mark.parametrize("backend", BACKENDS)
def test_coefficients_are_those_of_plain_python(shape: tuple[int, ...], transform: Transform, backend: Backend) -> None:
    if math.prod(shape) > 3000:
        shape = (shape[0] // 8, *shape[1:])
    cut, x = _cut(shape, transform), vector(math.prod(shape), dtype=torch.float64)
    positions, values = kernels.chunk_topk.on(backend)([x], [cut])
    expected = _coefficients(x.tolist(), cut)
    for chunk, (where, found) in enumerate(
        zip(positions.view(cut.chunks, cut.kept).tolist(), values.view(cut.chunks, cut.kept).tolist(), strict=True)
    ):
        order = sorted(range(cut.size), key=lambda at: (-abs(expected[chunk][at]), at))
        assert where == sorted(order[: cut.kept])
        assert found == pytest.approx([expected[chunk][at] for at in where], rel=1e-12, abs=1e-14)


@transforms
@dtypes
@pytest.mark.parametrize("how", SUMS)
def test_several_sums_are_treated_like_each(transform: Transform, dtype: torch.dtype, how: How) -> None:
    cuts = [_cut(shape, transform) for shape in SHAPES for _ in range(2 + (shape == (7,)))]
    each = [summed(how, vector(cut.numel, 100 + i, dtype)) for i, cut in enumerate(cuts)]
    every, first = joined(each), joined(each)
    found = kernels.accumulate_chunk_topk.cpu(every, cuts)
    kernels.accumulate.reference(first)
    torch.testing.assert_close(every.outs, first.outs)
    chosen = kernels.chunk_topk.cpu(wide_each(every.outs), cuts)
    assert all(map(torch.equal, found, chosen))
    singles = [kernels.chunk_topk.cpu([wide(x)], [cut]) for x, cut in zip(every.outs, cuts, strict=True)]
    assert all(torch.equal(a, torch.cat(b)) for a, b in zip(found, zip(*singles, strict=True), strict=True))


@pytest.mark.grid
@shapes
@transforms
@pytest.mark.parametrize("backend", BACKENDS)
def test_all_coefficients_give_the_tensor_back(shape: tuple[int, ...], transform: Transform, backend: Backend) -> None:
    cut, x = _cut(shape, transform, density=1.0), vector(math.prod(shape), dtype=torch.float64)
    positions, values = kernels.chunk_topk.on(backend)([x], [cut])
    out = torch.full_like(x, torch.nan)
    _put(backend, out, positions, values, cut)
    torch.testing.assert_close(out, x, rtol=0, atol=1e-14)


def _put(
    backend: Backend, out: Tensor, positions: Tensor, values: Tensor, cut: Chunking, *, subtract: bool = False
) -> None:
    """Write or subtract what one rank chose after another, of the second of three vectors."""
    where, what = ((x.view(-1, cut.count) if cut.count else x.view(1, 0)).repeat(1, 3) for x in (positions, values))
    outs = [vector(cut.numel, 8, out.dtype), out, vector(cut.numel, 9, out.dtype)]
    kernels.chunk_put.on(backend)(outs, where, what, [cut] * 3, subtract)


def _inputs(numel: int, dtype: torch.dtype) -> dict[str, Tensor]:
    some = torch.arange(numel) % 11 == 3
    return {
        "usual": vector(numel, dtype=dtype),
        "equal": torch.ones(numel, dtype=dtype),
        "zeros": torch.zeros(numel, dtype=dtype),
        "few": torch.where(some, vector(numel, dtype=dtype), 0),
        "whole": (4 * vector(numel, dtype=dtype)).round(),
    }


@pytest.mark.grid
@shapes
@dtypes
@pytest.mark.parametrize(("transform", "density", "chunk"), [("dct", 0.02, 16), ("hadamard", 0.3, 32), (None, 0.1, 7)])
def test_backends_agree(
    shape: tuple[int, ...], dtype: torch.dtype, transform: Transform, density: float, chunk: int
) -> None:
    cut = _cut(shape, transform, density, chunk)
    for x in _inputs(cut.numel, dtype).values():
        _agree(cut, x)


def _agree(cut: Chunking, x: Tensor) -> None:
    """Hold both implementations together: the same picks but for rounding, and the same bits decoded."""
    (positions, values), (others, expected) = (kernels.chunk_topk.on(backend)([x], [cut]) for backend in BACKENDS)
    both = positions.view(cut.chunks, cut.kept)
    assert bool((both.diff(dim=1) > 0).all())
    assert bool(((both >= 0) & (both < cut.size)).all())
    if cut.transform is None:
        assert torch.equal(positions, others)
        assert torch.equal(values, expected)
    close = 100 * torch.finfo(x.dtype).eps
    found, least = (each.abs().view(cut.chunks, cut.kept).sort().values for each in (values, expected))
    torch.testing.assert_close(found, least, rtol=close, atol=close)
    positions, values = torch.cat([positions, others]), torch.cat([values, 2 * expected])
    for subtract in (False, True):
        outs = [vector(cut.numel, seed=1, dtype=x.dtype) for _ in BACKENDS]
        for backend, out in zip(BACKENDS, outs, strict=True):
            _put(backend, out, positions, values, cut, subtract=subtract)
        assert torch.equal(*outs)


@pytest.mark.parametrize("transform", ["dct", None])
def test_backends_agree_over_several_ranges(transform: Literal["dct"] | None) -> None:
    cut = _cut((515, 1040), transform, 0.02)
    assert cut.chunks * cut.size > 2 * (1 << 18)
    _agree(cut, vector(cut.numel))
    found, expected = (summed("fading", vector(cut.numel)) for _ in range(2))
    chosen = kernels.accumulate_chunk_topk.cpu(found, [cut])
    kernels.accumulate.reference(expected)
    torch.testing.assert_close(found.outs, expected.outs)
    assert all(map(torch.equal, chosen, kernels.chunk_topk.cpu(found.outs, [cut])))


def test_subsets_over_several_ranges() -> None:
    numbering = Numbering(0, 16, 6)
    every = torch.tensor(list(combinations(range(16), 6)), dtype=torch.int16)
    positions = every[torch.arange(90_001) * 17 % len(every)].view(-1)
    _numbered_alike(positions, numbering, 1)
    rows = positions.view(-1, 6)[:90_000].reshape(3, -1)[:, : 6 * 29_999].contiguous()  # none ends with a byte
    _numbered_alike(rows.view(-1), numbering, 3)


def _numbered_alike(positions: Tensor, numbering: Numbering, regions: int) -> None:
    """Check that Numba numbers positions as the reference does, and finds them again."""
    count = len(positions) // regions // numbering.kept
    packed, expected = (
        kernels.subsets_encode.on(backend)(positions, (Numbered(numbering, regions, count),)) for backend in BACKENDS
    )
    assert torch.equal(packed, expected)
    found = kernels.subsets_decode.cpu(packed.view(regions, -1), count, numbering)
    assert torch.equal(found.view(-1), positions)


@transforms
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_not_finite_stays_in_its_chunk_and_is_not_hidden(
    transform: Transform, poison: float, backend: Backend
) -> None:
    cut, x = _cut((40, 48), transform, 0.02), vector(40 * 48)
    x[17 * 48 + 20] = poison
    out = torch.empty_like(x)
    _put(backend, out, *kernels.chunk_topk.on(backend)([x], [cut]), cut)
    rows, columns = (~out.view(40, 48).isfinite()).nonzero(as_tuple=True)
    assert rows.numel()
    assert {int(row) // cut.height for row in rows} == {17 // cut.height}
    assert {int(column) // cut.width for column in columns} == {20 // cut.width}


@dtypes
@pytest.mark.parametrize(("density", "each"), [(0.1, 64), (0.01, 16)])
def test_no_more_nans_are_chosen_than_there_is_room_for(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, density: float, each: int
) -> None:
    """NaNs of all ones, as GPUs and half-precision loops make, are above every bar."""
    cut, x, rooms = _cut((64 * 40,), None, density), vector(64 * 40, dtype=dtype), list[Tensor]()
    integer = torch.int32 if dtype == torch.float32 else torch.int64
    x.view(integer).view(-1, 64)[:, :each] = torch.iinfo(integer).max

    def room(count: int, kind: torch.dtype, device: torch.device) -> Tensor:
        rooms.append(torch.full((count + 64,), -7, dtype=kind, device=device))
        return rooms[-1][:count]

    monkeypatch.setattr(cpu, "empty", room)
    positions, values = kernels.chunk_topk.cpu([x], [cut])
    assert torch.equal(positions, kernels.chunk_topk.reference([x], [cut])[0])
    assert bool(values.isnan().all())
    assert all(bool((each[-64:] == -7).all()) for each in rooms)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("size", "kept"), [(1, 1), (4, 1), (5, 3), (6, 6), (9, 4)])
def test_subsets_are_numbered_in_order_of_their_largest_positions(size: int, kept: int, backend: Backend) -> None:
    every = sorted(combinations(range(size), kept), key=lambda subset: subset[::-1])
    numbering = Numbering(0, size, kept)
    positions = torch.tensor(every, dtype=torch.int16).view(-1)
    packed = kernels.subsets_encode.on(backend)(positions, (Numbered(numbering, 1, len(every)),))
    bits = (len(every) - 1).bit_length()
    whole = int.from_bytes(bytes(packed.tolist()), "little")
    assert [whole >> i * bits & ((1 << bits) - 1) for i in range(len(every))] == list(range(len(every)))
    found = kernels.subsets_decode.on(backend)(packed[None].repeat(3, 1), len(every), numbering)
    assert torch.equal(found, positions.repeat(3, 1))


@pytest.mark.parametrize("backend", BACKENDS)
def test_bytes_that_number_no_subset_give_no_positions(backend: Backend) -> None:
    numbering = Numbering(0, 10, 2)  # 45 subsets, 6 bits each: 18 bits in 3 bytes
    rows = torch.tensor([[0, 0, 0], [44, 0, 0], [45, 0, 0], [0, 0xC0, 2], [0, 0xD0, 2], [0, 0, 4]], dtype=torch.uint8)
    found = kernels.subsets_decode.on(backend)(rows, 3, numbering)
    assert found[:2].tolist() == [[0, 1] * 3, [8, 9, 0, 1, 0, 1]]
    assert found[3].tolist() == [0, 1, 0, 1, 8, 9]
    assert bool((found[[2, 4, 5]] == -1).all())


def _random_subsets(size: int, kept: int, count: int) -> Tensor:
    """Return positions of subsets, the first and the last among them."""
    generator = torch.Generator().manual_seed(size + kept)
    chosen = [torch.randperm(size, generator=generator)[:kept].sort().values for _ in range(count)]
    chosen[:2] = [torch.arange(kept), torch.arange(size - kept, size)]
    return torch.cat(chosen).short()


LONG = [(256, 26), (200, 30), (85, 26), (100, 88), (159, 32), (1024, 14), (70, 35)]


@pytest.mark.parametrize(("size", "kept"), LONG)
@pytest.mark.parametrize("backend", BACKENDS)
def test_numbers_of_two_digits_are_those_of_plain_python(size: int, kept: int, backend: Backend) -> None:
    numbering, count = Numbering(0, size, kept), 300
    assert numbering.digits == 2
    positions = _random_subsets(size, kept, count)
    numbers = [sum(math.comb(p, i) for i, p in enumerate(subset, 1)) for subset in positions.view(count, kept).tolist()]
    whole = sum(number << at * numbering.bits for at, number in enumerate(numbers))
    packed = kernels.subsets_encode.on(backend)(positions, (Numbered(numbering, 1, count),))
    assert bytes(packed.tolist()) == whole.to_bytes(-(-count * numbering.bits // 8), "little")
    found = kernels.subsets_decode.on(backend)(packed[None].repeat(2, 1), count, numbering)
    assert torch.equal(found, positions.repeat(2, 1))


@pytest.mark.parametrize("backend", BACKENDS)
def test_bytes_that_number_no_subset_of_two_digits_give_no_positions(backend: Backend) -> None:
    numbering = Numbering(0, 85, 26)
    numbers = [numbering.subsets - 1, numbering.subsets, numbering.subsets + 2**63, (1 << numbering.bits) - 1]
    rows = [list(number.to_bytes(-(-numbering.bits // 8), "little")) for number in numbers]
    rows.append([*rows[0][:-1], rows[0][-1] | 1 << numbering.bits % 8])
    found = kernels.subsets_decode.on(backend)(torch.tensor(rows, dtype=torch.uint8), 1, numbering)
    assert found[0].tolist() == list(range(59, 85))
    assert bool((found[1:] == -1).all())


def test_two_digits_over_several_ranges() -> None:
    numbering, count = Numbering(0, 85, 26), 40_001
    positions = _random_subsets(85, 26, 101).view(101, 26)[torch.arange(count) * 17 % 101].reshape(-1)
    _numbered_alike(positions, numbering, 1)


@pytest.mark.parametrize(("size", "kept"), [(64, 6), (85, 26)])
@pytest.mark.usefixtures("two_threads")
def test_rows_that_several_threads_number_are_those_of_the_reference(size: int, kept: int) -> None:
    numbering, count = Numbering(0, size, kept), 600_001 // kept | 1
    assert count * numbering.bits % 8, "rows lie apart"
    row = _random_subsets(size, kept, 101).view(101, kept)[torch.arange(count) * 17 % 101].reshape(-1)
    _numbered_alike(torch.cat([row, row.roll(kept), row.roll(2 * kept)]), numbering, 3)


@pytest.mark.parametrize("size", [64, 256, 1024, 4096])
def test_positions_cost_at_most_three_tenths_of_a_bit_over_entropy(size: int) -> None:
    side = math.isqrt(size)
    for kept in range(1, 33):
        positions = torch.arange(kept, dtype=torch.int16).repeat(100)
        cut = Chunking(100 * size, 100 * side, side, side, kept, None)
        payload = Chunks(positions=positions, values=torch.zeros(100 * kept), numel=cut.numel, chunkings=(cut,))
        cost = 8 * (payload.nbytes - 24 - 400 * kept - 8) / (100 * kept)  # without padding
        assert cost <= math.log2(math.comb(size, kept)) / kept + 0.3


def test_a_payload_costs_what_its_numbers_cost() -> None:
    codec = codecs.ChunkTopK(density=6 / 256, values=torch.bfloat16)
    payload = codec.encode(torch.ones(256, 512))
    chunks = 16 * 32
    assert payload.nbytes == 24 + chunks * 6 * 2 + chunks * 39 // 8  # C(256, 6) < 2³⁹

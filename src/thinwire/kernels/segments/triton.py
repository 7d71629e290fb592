"""Several vectors in one launch. A table on the device says where each lies, and each program takes a tile of one.

A launch costs as much time as reading some megabytes, so for a bucket's small tensors it is launches that count.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from thinwire.kernels.memory import kept, sent, sent_anew
from thinwire.kernels.parts import begins
from thinwire.kernels.triton import TILE, launch, magnitudes

_DIGIT = 8  # bits: of more bins, counting and reading them takes longer than another pass over the elements
DIGIT, BINS = tl.constexpr(_DIGIT), tl.constexpr(1 << _DIGIT)
LEVELS = {2: 2, 4: 4, 8: 8}
"""How many digits a magnitude of so many bytes has."""
COUNTERS = {nbytes: levels << _DIGIT for nbytes, levels in LEVELS.items()}
"""How many counters a vector's digits take."""


def addresses(xs: Sequence[Tensor]) -> "NDArray[Any]":
    """Return where the tensors' elements begin. Fake ones, which do not come together with others, lie nowhere."""
    return np.zeros(len(xs), np.int64) if isinstance(xs[0], FakeTensor) else begins(xs)


def table(device: torch.device, *columns: "Sequence[int] | NDArray[Any]") -> Tensor:
    """Return columns of numbers, int64, on a device: (columns, rows). The host does not wait.

    Rows are filled up to an even number, so that every column begins at a multiple of 16 bytes.
    """
    return table_of(device, lambda: columns)


def table_of(device: torch.device, columns: "Callable[[], Sequence[Sequence[int] | NDArray[Any]]]") -> Tensor:
    """Return the table of columns that may depend on numbers that change with the step."""

    def numbers() -> Tensor:
        made = columns()
        rows = len(made[0])
        found = np.zeros((len(made), rows + rows % 2), np.int64)
        found[:, :rows] = made
        return torch.frombuffer(found, dtype=torch.int64).view(found.shape)

    return sent_anew(numbers, device)


def factors(like: Tensor, numbers: Sequence[float]) -> "NDArray[Any]":
    """Return numbers as a column of a `table` for `factor_at`: as precise as sums that go to `like` are."""
    real, bits = (np.float64, np.int64) if like.dtype == torch.float64 else (np.float32, np.int32)
    return np.array(numbers, real).view(bits)


class Tiles(NamedTuple):
    """The tiles of several vectors, one vector's after another's.

    of: int32 (3, tiles): for each tile its vector, where it begins there, and the number of the vector's first tile.
    """

    of: Tensor
    total: int


def tiles_of_each(lengths: tuple[int, ...], device: torch.device, tile: int = TILE) -> Tiles:
    """Return the tiles of vectors of these lengths, kept because layouts stay."""
    return Tiles(_tiles_of_each(lengths, device, tile), sum(-(-length // tile) for length in lengths))


@kept
def _tiles_of_each(lengths: tuple[int, ...], device: torch.device, tile: int) -> Tensor:
    tiles = [-(-length // tile) for length in lengths]
    vector = np.repeat(np.arange(len(lengths)), tiles)
    first = np.repeat(np.cumsum([0, *tiles[:-1]]), tiles)
    of = np.array([vector, (np.arange(len(vector)) - first) * tile, first], np.int32)
    return sent(torch.frombuffer(bytearray(of.tobytes() or bytes(4)), dtype=torch.int32), device)


class Strided(NamedTuple):
    """Every stride-th element of several vectors: columns of a `table`. None: from the first element on, all of them.

    at: where the vectors begin. size: how many elements are taken of each.
    """

    at: Tensor
    size: Tensor
    offset: Tensor | None = None
    stride: Tensor | None = None


def count_digits(
    xs: Strided, like: Tensor, tiles: Tiles, histograms: Tensor, wanted: Tensor, nans: Tensor | None = None
) -> None:
    """Count the first digits of magnitudes, then the next ones of those that may be the wanted[i]-th largest.

    `histograms`: int32 zeros (COUNTERS of each vector). Where 0 is wanted, nothing is counted.
    Where there is a NaN, `nans` (int32 zeros, one for each vector) becomes 1.
    """
    levels = LEVELS[like.element_size()]
    for level in range(levels):
        args = (histograms, like, *xs, wanted, nans, tiles.of, tiles.total, level)
        launch(_count_digits, tiles.total, *args, LEVELS=levels, TILE=TILE, num_warps=8)


def write_largest(
    xs: Strided,
    like: Tensor,
    tiles: Tiles,
    histograms: Tensor,
    wanted: Tensor,
    starts: Tensor,
    out: tuple[Tensor, Tensor],
) -> None:
    """Write the indices and values of the wanted[i] largest of each vector, from place starts[i] on."""
    levels = LEVELS[like.element_size()]
    count_digits(xs, like, tiles, histograms, wanted)
    counts = torch.empty(tiles.total, dtype=torch.int64, device=like.device)
    args = (histograms, like, xs.at, xs.size, wanted, tiles.of, tiles.total, counts)
    launch(_count, tiles.total, *args, LEVELS=levels, TILE=TILE, num_warps=8)
    ends = counts.cumsum(0)
    launch(_place, tiles.total, *args, ends, starts, *out, LEVELS=levels, TILE=TILE, num_warps=8)


@triton.jit
def bar_of(histograms, k, levels):
    """Return the first digits of the k-th largest, and how many of the k largest share them."""
    bins = tl.arange(0, BINS)
    bar, left = k.to(tl.int64) * 0, k.to(tl.int32)
    for level in range(levels):
        histogram = tl.load(histograms + level * BINS + bins)
        above = tl.sum(histogram, 0) - tl.cumsum(histogram, 0)
        digit = tl.sum((above >= left).to(tl.int32), 0)
        left -= tl.sum(tl.where(bins == digit, above, 0), 0)
        bar = (bar << DIGIT) + digit
    return bar, left


@triton.jit
def pointer(addresses, vector, like):
    """Return where a vector begins, as a pointer to elements of the type of `like`."""
    return tl.load(addresses + vector).to(tl.pointer_type(like.dtype.element_ty))


@triton.jit
def factor_at(column, vector, like):
    """Return where a number of `factors` is."""
    real = tl.float64 if like.dtype.element_ty.primitive_bitwidth == 64 else tl.float32
    return (column + vector).to(tl.pointer_type(real), bitcast=True)


@triton.jit(do_not_specialize=["count", "level"])
def _count_digits(
    histograms,
    like,
    at,
    size,
    offset,
    stride,
    wanted,
    nans,
    tiles,
    count,
    level,
    LEVELS: tl.constexpr,
    TILE: tl.constexpr,
):
    vector = tl.load(tiles + tl.program_id(0))
    k = tl.load(wanted + vector)
    if k == 0:
        return
    mine = histograms + vector * LEVELS * BINS
    bar, _left = bar_of(mine, k, level)
    x = pointer(at, vector, like)
    place = tl.load(tiles + count + tl.program_id(0)).to(tl.int64) + tl.arange(0, TILE)
    valid = place < tl.load(size + vector)
    if stride is not None:
        place = tl.load(offset + vector) + place * tl.load(stride + vector)
    bits = magnitudes(tl.load(x + place, mask=valid))
    if nans is not None:
        infinity = magnitudes(tl.full([1], float("inf"), like.dtype.element_ty))
        if tl.sum((valid & (bits > infinity)).to(tl.int32), 0) > 0:
            tl.atomic_or(nans + vector, 1, sem="relaxed")
    digits = bits >> (DIGIT * (LEVELS - 1 - level))
    valid = valid & ((digits >> DIGIT) == bar.to(bits.dtype))
    counts = tl.histogram((digits & (BINS - 1)).to(tl.int32), BINS, mask=valid)
    tl.atomic_add(mine + level * BINS + tl.arange(0, BINS), counts, mask=counts > 0, sem="relaxed")


@triton.jit
def _above_and_ties(like, at, size, vector, start, bar, TILE: tl.constexpr):
    place = start + tl.arange(0, TILE)
    valid = place < tl.load(size + vector)
    x = tl.load(pointer(at, vector, like) + place, mask=valid)
    bits = magnitudes(x)
    bar = bar.to(bits.dtype)
    return (valid & (bits > bar)).to(tl.int32), (valid & (bits == bar)).to(tl.int32), place, x


@triton.jit(do_not_specialize=["count"])
def _count(histograms, like, at, size, wanted, tiles, count, counts, LEVELS: tl.constexpr, TILE: tl.constexpr):
    tile = tl.program_id(0)
    vector, start = tl.load(tiles + tile), tl.load(tiles + count + tile)
    k = tl.load(wanted + vector)
    if k == 0:
        tl.store(counts + tile, 0)
        return
    bar, _left = bar_of(histograms + vector * LEVELS * BINS, k, LEVELS)
    above, ties, _index, _x = _above_and_ties(like, at, size, vector, start, bar, TILE)
    tl.store(counts + tile, (tl.sum(above, 0).to(tl.int64) << 32) + tl.sum(ties, 0))


@triton.jit(do_not_specialize=["count"])
def _place(
    histograms,
    like,
    at,
    size,
    wanted,
    tiles,
    count,
    counts,
    ends,
    starts,
    indices,
    values,
    LEVELS: tl.constexpr,
    TILE: tl.constexpr,
):
    tile = tl.program_id(0)
    vector, start, first = tl.load(tiles + tile), tl.load(tiles + count + tile), tl.load(tiles + 2 * count + tile)
    k = tl.load(wanted + vector)
    if k == 0:
        return
    bar, allowed = bar_of(histograms + vector * LEVELS * BINS, k, LEVELS)
    above, ties, index, x = _above_and_ties(like, at, size, vector, start, bar, TILE)
    before = tl.load(ends + tile) - tl.load(counts + tile)
    before -= tl.load(ends + first) - tl.load(counts + first)
    within = tl.cumsum((above << 16) + ties, 0)
    ties_before = (before & 0xFFFFFFFF).to(tl.int32) + (within & 0xFFFF) - ties
    place = (before >> 32).to(tl.int32) + (within >> 16) - above + tl.minimum(ties_before, allowed)
    taken = (above > 0) | ((ties > 0) & (ties_before < allowed))
    begin = tl.load(starts + vector)
    tl.store(indices + begin + place, index, mask=taken)
    tl.store(values + begin + place, x, mask=taken)

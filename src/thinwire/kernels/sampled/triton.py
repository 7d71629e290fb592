"""Several vectors in one launch an operation: summed, sampled and searched.

The k-th largest of a sample is found digit by digit, like that of a vector. So the threshold never reaches the host.
"""

from collections.abc import Sequence
from itertools import accumulate as running
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.kernels.accumulate.triton import accumulate
from thinwire.kernels.replay import fixed
from thinwire.kernels.sampled.reference import Draw, one_by_one
from thinwire.kernels.select.triton import (
    BINS,
    COUNTERS,
    LEVELS,
    Strided,
    accumulate_select,
    bar_of,
    count_digits,
    largest,
    write_largest,
)
from thinwire.kernels.sums import Sum
from thinwire.kernels.triton import TILE, addresses, launch, magnitudes, pointer, table_of, tiles_of_each

_ROOM = 64
"""How many picks of a tile are kept. A tile with more is searched again."""


def accumulate_sampled_select(sums: Sum, draws: Sequence[Draw]) -> tuple[Tensor, Tensor]:
    if sums.how == "rounded":  # the sample is taken before that
        return one_by_one(sums, draws, accumulate_select, largest)
    accumulate(sums)
    return sampled_select(sums.outs, draws)


def sampled_select(xs: Sequence[Tensor], draws: Sequence[Draw]) -> tuple[Tensor, Tensor]:
    """Pick from each vector as its draw says. Returns indices and values as `accumulate_sampled_select` does."""
    like, device, lengths = xs[0], xs[0].device, [x.numel() for x in xs]
    capacities = [draw.capacity for draw in fixed(draws)]
    starts, where = list(running(capacities[:-1], initial=0)), addresses(xs)

    def columns() -> Sequence[Any]:
        now = list(draws)
        sampled = [-(-(n - draw.offset) // draw.stride) for n, draw in zip(lengths, now, strict=True)]
        offsets, strides, ranks, _ = zip(*now, strict=True)
        return where, lengths, sampled, offsets, strides, ranks, capacities, starts

    at, size, samples, offset, stride, rank, room, begin = table_of(device, columns)
    size_of_all = len(xs) * COUNTERS[like.element_size()]
    zeros = torch.zeros(2 * size_of_all + 2 * len(xs), dtype=torch.int32, device=device)
    first, second, nans, over = zeros.split([size_of_all, size_of_all, len(xs), len(xs)])
    most = tuple(-(-n // draw.stride) for n, draw in zip(lengths, fixed(draws), strict=True))  # the same in every step
    count_digits(Strided(at, samples, offset, stride), like, tiles_of_each(most, device), first, rank, nans)
    indices = torch.full((sum(capacities),), -1, dtype=torch.int32, device=device)
    values, tiles = like.new_zeros(sum(capacities)), tiles_of_each(tuple(lengths), device)
    counts, kept = indices.new_empty(len(tiles)), indices.new_empty(len(tiles), _ROOM)
    among = (like, at, size, first, nans, rank, tiles)
    sizes = {"LEVELS": LEVELS[like.element_size()], "TILE": TILE, "ROOM": _ROOM, "num_warps": 8}
    launch(_find, len(tiles), counts, kept, *among, **sizes)
    ends = counts.cumsum(0, dtype=torch.int32)
    args = (indices, values, counts, kept, ends, room, begin, over, *among)
    launch(_gather, len(tiles), *args, **sizes)
    write_largest(Strided(at, size), like, tiles, second, over, begin, (indices, values))
    return indices, values


@triton.jit
def _hits(like, at, size, histograms, nans, rank, vector, start, LEVELS: tl.constexpr, TILE: tl.constexpr):
    """Return which elements of a tile reach the threshold, their indices, and the elements."""
    place = start + tl.arange(0, TILE)
    valid = place < tl.load(size + vector)
    x = tl.load(pointer(at, vector, like) + place, mask=valid)
    bits, k = magnitudes(x), tl.load(rank + vector)
    bar, _left = bar_of(histograms + vector * LEVELS * BINS, k, LEVELS)
    # If the sample has a NaN, the threshold is infinity.
    infinity = magnitudes(tl.full([1], float("inf"), like.dtype.element_ty)).to(tl.int64)
    bar = tl.where(tl.load(nans + vector) > 0, infinity, tl.maximum(bar, 1))
    least = tl.where(k == 0, 1, bar)
    return (valid & (bits >= least.to(bits.dtype))).to(tl.int32), place, x


@triton.jit
def _find(
    counts, kept, like, at, size, histograms, nans, rank, tiles,
    LEVELS: tl.constexpr, TILE: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    vector, start = tl.load(tiles + 3 * tile), tl.load(tiles + 3 * tile + 1)
    hit, index, _x = _hits(like, at, size, histograms, nans, rank, vector, start, LEVELS, TILE)
    place = tl.cumsum(hit, 0) - 1
    tl.store(kept + tile * ROOM + place, index, mask=(hit > 0) & (place < ROOM))
    tl.store(counts + tile, tl.sum(hit, 0))


@triton.jit
def _gather(
    indices, values, counts, kept, ends, room, begin, over, like, at, size, histograms, nans, rank, tiles,
    LEVELS: tl.constexpr, TILE: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """Write the picks of a vector's tiles one after another; if they are too many, say so in `over`."""
    tile = tl.program_id(0)
    vector, start, first = tl.load(tiles + 3 * tile), tl.load(tiles + 3 * tile + 1), tl.load(tiles + 3 * tile + 2)
    last = first + tl.cdiv(tl.load(size + vector), TILE) - 1
    before, here = tl.load(ends + first) - tl.load(counts + first), tl.load(counts + tile)
    capacity = tl.load(room + vector)
    if tl.load(ends + last) - before > capacity:
        tl.store(over + vector, capacity)
        return
    out = tl.load(begin + vector) + tl.load(ends + tile) - here - before
    if here <= ROOM:
        place = tl.arange(0, ROOM)
        index = tl.load(kept + tile * ROOM + place, mask=place < here, other=0)
        x = tl.load(pointer(at, vector, like) + index, mask=place < here)
        tl.store(indices + out + place, index, mask=place < here)
        tl.store(values + out + place, x, mask=place < here)
    else:
        # Other names, because a name stands for one shape.
        hit, found, element = _hits(like, at, size, histograms, nans, rank, vector, start, LEVELS, TILE)
        among = tl.cumsum(hit, 0) - 1
        tl.store(indices + out + among, found, mask=hit > 0)
        tl.store(values + out + among, element, mask=hit > 0)

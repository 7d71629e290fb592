"""Several vectors in one launch an operation: summed, sampled and searched.

The k-th largest of a sample is found digit by digit, like that of a vector. So the threshold never reaches the host.
Of a small sample one program for each vector finds it, before anything is summed: the sums are then searched in the
pass that makes them.
"""

from collections.abc import Sequence
from itertools import accumulate as running
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.kernels.accumulate.triton import accumulate_and_clear, arguments_of_each, of_vector, summed, total
from thinwire.kernels.replay import fixed
from thinwire.kernels.sampled.reference import Draw, one_by_one
from thinwire.kernels.select.triton import (
    BINS,
    COUNTERS,
    DIGIT,
    LEVELS,
    TOGETHER,
    Strided,
    accumulate_select,
    bar_of,
    count_digits,
    counted_before,
    largest,
    note_count,
)
from thinwire.kernels.sums import Sum
from thinwire.kernels.triton import TILE, addresses, launch, magnitudes, pointer, table_of, tiles_of, tiles_of_each

_ROOM = 64
"""How many picks of a tile are kept. A tile with more is searched again."""
_CHUNK = 2 * TILE
_SMALL = 2 * _CHUNK
"""A sample of so many elements is searched by one program."""


def accumulate_sampled_select(sums: Sum, draws: Sequence[Draw]) -> tuple[Tensor, Tensor]:
    if sums.how == "rounded":  # the sample is taken before that
        return one_by_one(sums, draws, accumulate_select, largest)
    xs = sums.outs
    like, device, lengths = xs[0], xs[0].device, [x.numel() for x in xs]
    known = fixed(draws)  # of which is taken what is the same in every step, or only says how much room there is
    capacities = [draw.capacity for draw in known]
    rooms = [draw.room(n) for draw, n in zip(known, lengths, strict=True)]
    most = tuple(-(-n // draw.stride) for n, draw in zip(lengths, known, strict=True))
    starts, begins, drawn_at = (list(running(each[:-1], initial=0)) for each in (capacities, rooms, most))
    where = addresses(xs)

    def columns() -> Sequence[Any]:
        now = list(draws)
        sampled = [-(-(n - draw.offset) // draw.stride) for n, draw in zip(lengths, now, strict=True)]
        offsets, strides, ranks, _, firsts, lasts = zip(*now, strict=True)
        return (
            where,
            lengths,
            sampled,
            offsets,
            strides,
            ranks,
            drawn_at,
            capacities,
            starts,
            rooms,
            begins,
            firsts,
            lasts,
        )

    at, size, samples, offset, stride, rank, place, *places = table_of(device, columns)
    tiles, counters = tiles_of_each(tuple(lengths), device), len(xs) * COUNTERS[like.element_size()]
    zeros = torch.empty(counters + 2 * len(xs) + tiles_of(len(tiles), TOGETHER), dtype=torch.int32, device=device)
    histograms, nans, totals, shared = zeros.split([counters, len(xs), len(xs), tiles_of(len(tiles), TOGETHER)])
    levels = {"LEVELS": LEVELS[like.element_size()], "CHUNK": _CHUNK, "num_warps": 16}
    bars, how, of_each = None, "given", list[Tensor | None]([None] * 8)
    if max(most) > _SMALL:
        accumulate_and_clear(sums, zeros)
        count_digits(Strided(at, samples, offset, stride), like, tiles_of_each(most, device), histograms, rank, nans)
    else:
        how, of_each = sums.how, [*arguments_of_each(sums)]
        bars = torch.empty(len(xs), dtype=torch.int64, device=device)
        drawn = (samples, offset, stride, rank, place, like.new_empty(sum(most)), shared, len(shared))
        launch(_threshold, len(xs), bars, like, *of_each, *drawn, HOW=how, **levels)
    indices, values = zeros.new_empty(sum(capacities)), like.new_empty(sum(capacities))
    counts, kept, candidates = (zeros.new_empty(n) for n in (len(tiles), len(tiles) * _ROOM, sum(rooms)))
    given = (like, at, size, histograms, nans, rank, bars, tiles)
    sizes = {"LEVELS": LEVELS[like.element_size()], "TILE": TILE, "ROOM": _ROOM, "num_warps": 8}
    launch(_find, len(tiles), counts, shared, kept, *of_each, *given, HOW=how, **sizes)
    out = (indices, values, totals, candidates, *places)
    launch(_gather, len(tiles), *out, counts, shared, kept, *given, **sizes)
    launch(_trim, len(xs), *out, like, at, size, **levels)
    return indices, values


@triton.jit
def _kth(x, candidates, known, count, left, LEVELS: tl.constexpr, CHUNK: tl.constexpr):
    """Return the left-th largest magnitude among candidates, and how many of the largest equal it."""
    bins, bar = tl.arange(0, BINS), left.to(tl.int64) * 0
    for level in tl.static_range(LEVELS):
        counts = tl.zeros([BINS], tl.int32)
        for first in range(0, count, CHUNK):
            _index, _x, bits, there = _candidate(x, candidates, known, first, count, CHUNK)
            digits = bits >> (DIGIT * (LEVELS - 1 - level))
            there = there & ((digits >> DIGIT) == bar.to(bits.dtype))
            counts += tl.histogram((digits & (BINS - 1)).to(tl.int32), BINS, mask=there)
        above = tl.sum(counts, 0) - tl.cumsum(counts, 0)
        digit = tl.sum((above >= left).to(tl.int32), 0)
        left -= tl.sum(tl.where(bins == digit, above, 0), 0)
        bar = (bar << DIGIT) + digit
    return bar, left


@triton.jit(do_not_specialize=["cleared"])
def _threshold(
    bars, like, gradient_like, out, velocity_out, residual, velocity, gradient, scale, momentum,
    size, offset, stride, rank, begin, sample, clear, cleared,
    HOW: tl.constexpr, LEVELS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Write the least magnitude that is picked of a vector: the rank-th largest of its sample, whose sums it makes."""
    vector, place = tl.program_id(0), tl.arange(0, CHUNK)
    for first in range(vector * CHUNK, cleared, tl.num_programs(0) * CHUNK):
        tl.store(clear + first + place, tl.zeros([CHUNK], tl.int32), mask=first + place < cleared)
    _out, _velocity_out, residual, velocity, gradient, scale, momentum = of_vector(
        like, gradient_like, out, velocity_out, residual, velocity, gradient, scale, momentum, vector
    )
    k = tl.load(rank + vector).to(tl.int32)
    count = tl.where(k > 0, tl.load(size + vector), 0).to(tl.int32)
    infinity = tl.sum(magnitudes(tl.full([1], float("inf"), like.dtype.element_ty)), 0)
    sample, top = sample + tl.load(begin + vector), infinity * 0
    for first in range(0, count, CHUNK):
        there = first + place < count
        at = tl.load(offset + vector) + (first + place) * tl.load(stride + vector)
        x, _kept = summed(residual, velocity, gradient, scale, momentum, 0, 0, at, there, HOW)
        tl.store(sample + first + place, x, mask=there)
        top = tl.maximum(top, tl.max(tl.where(there, magnitudes(x), 0), 0))
    tl.debug_barrier()  # the sample is there
    bar, _left = _kth(sample, None, False, count, k, LEVELS, CHUNK)
    least = tl.where(top > infinity, infinity.to(tl.int64), tl.maximum(bar, 1))
    tl.store(bars + vector, tl.where(k == 0, 1, least))


@triton.jit
def _reaching(x, valid, histograms, nans, rank, bars, vector, LEVELS: tl.constexpr):
    """Return which elements reach the vector's threshold."""
    bits = magnitudes(x)
    if bars is not None:
        least = tl.load(bars + vector)
    else:
        k = tl.load(rank + vector)
        bar, _left = bar_of(histograms + vector * LEVELS * BINS, k, LEVELS)
        # If the sample has a NaN, the threshold is infinity.
        infinity = magnitudes(tl.full([1], float("inf"), x.dtype)).to(tl.int64)
        bar = tl.where(tl.load(nans + vector) > 0, infinity, tl.maximum(bar, 1))
        least = tl.where(k == 0, 1, bar)
    return (valid & (bits >= least.to(bits.dtype))).to(tl.int32)


@triton.jit
def _find(
    counts, sums, kept, gradient_like, out, velocity_out, residual, velocity, gradient, scale, momentum,
    like, at, size, histograms, nans, rank, bars, tiles,
    HOW: tl.constexpr, LEVELS: tl.constexpr, TILE: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    tile, each = tl.program_id(0), tl.arange(0, TILE)
    vector, start = tl.load(tiles + 3 * tile), tl.load(tiles + 3 * tile + 1)
    valid, x = start + each < tl.load(size + vector), pointer(at, vector, like)
    if HOW != "given":
        x, velocity_out, residual, velocity, gradient, scale, momentum = of_vector(
            like, gradient_like, out, velocity_out, residual, velocity, gradient, scale, momentum, vector
        )
    element = total(x, velocity_out, residual, velocity, gradient, scale, momentum, 0, 0, start, each, valid, HOW)
    hit = _reaching(element, valid, histograms, nans, rank, bars, vector, LEVELS)
    place = tl.cumsum(hit, 0) - 1
    tl.store(kept + tile * ROOM + place, start + each, mask=(hit > 0) & (place < ROOM))
    note_count(counts, sums, tile, tl.sum(hit, 0))


@triton.jit
def _gather(
    indices, values, totals, candidates, capacity, begin, room, among, origin, padding, counts, sums, kept,
    like, at, size, histograms, nans, rank, bars, tiles,
    LEVELS: tl.constexpr, TILE: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """Write the picks of a vector's tiles one after another, and what is missing; too many go to the candidates.

    If there is no room for them there either, none is written.
    """
    tile = tl.program_id(0)
    vector, start, first = tl.load(tiles + 3 * tile), tl.load(tiles + 3 * tile + 1), tl.load(tiles + 3 * tile + 2)
    many, wanted = tl.cdiv(tl.load(size + vector), TILE), tl.load(capacity + vector).to(tl.int32)
    skipped, here = counted_before(counts, sums, first), tl.load(counts + tile)
    total = counted_before(counts, sums, first + many.to(tl.int32)) - skipped
    if tile == first:
        tl.store(totals + vector, total)
    if total > tl.maximum(wanted, tl.load(room + vector)):
        return
    fits, out, origin = total <= wanted, indices + tl.load(begin + vector), tl.load(origin + vector).to(tl.int32)
    if fits:
        for missing in range(total + (tile - first) * TILE, wanted, many.to(tl.int32) * TILE):
            place = missing + tl.arange(0, TILE)
            last = tl.zeros([TILE], tl.int32) + tl.load(padding + vector).to(tl.int32)
            tl.store(out + place, last, mask=place < wanted)
            empty = tl.zeros([TILE], like.dtype.element_ty)
            tl.store(values + tl.load(begin + vector) + place, empty, mask=place < wanted)
    else:
        out, origin = candidates + tl.load(among + vector), origin * 0
    before = counted_before(counts, sums, tile) - skipped
    numbers = values + tl.load(begin + vector) + before
    if here <= ROOM:
        place = tl.arange(0, ROOM)
        index = tl.load(kept + tile * ROOM + place, mask=place < here, other=0)
        x = tl.load(pointer(at, vector, like) + index, mask=place < here)
        tl.store(out + before + place, origin + index, mask=place < here)
        tl.store(numbers + place, x, mask=(place < here) & fits)
    else:
        # Other names, because a name stands for one shape.
        found = start + tl.arange(0, TILE)
        valid = found < tl.load(size + vector)
        element = tl.load(pointer(at, vector, like) + found, mask=valid)
        hit = _reaching(element, valid, histograms, nans, rank, bars, vector, LEVELS)
        within = tl.cumsum(hit, 0) - 1
        tl.store(out + before + within, origin + found, mask=hit > 0)
        tl.store(numbers + within, element, mask=(hit > 0) & fits)


@triton.jit
def _candidate(x, candidates, known, first, count, CHUNK: tl.constexpr):
    """Return indices of a vector that may be among the largest, its elements there, magnitudes, and which there are."""
    place = first + tl.arange(0, CHUNK)
    there = place < count
    index = place
    if candidates is not None:
        index = tl.where(known, tl.load(candidates + place, mask=there & known, other=0), place)
    element = tl.load(x + index, mask=there)
    return index, element, magnitudes(element), there


@triton.jit
def _trim(
    indices, values, totals, candidates, capacity, begin, room, among, origin, padding, like, at, size,
    LEVELS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Write the largest of a vector's candidates; if there was no room for them, of all elements, which takes longer.

    A program takes a vector: as a rule there are few more candidates than are wanted.
    """
    vector = tl.program_id(0)
    total, left = tl.load(totals + vector), tl.load(capacity + vector).to(tl.int32)
    if (total <= left) | (left == 0):
        return
    known, x = total <= tl.load(room + vector), pointer(at, vector, like)
    candidates += tl.load(among + vector)
    count = tl.where(known, total, tl.load(size + vector)).to(tl.int32)
    bar, left = _kth(x, candidates, known, count, left, LEVELS, CHUNK)
    taken, tied = total * 0, total * 0
    for first in range(0, count, CHUNK):
        index, element, bits, there = _candidate(x, candidates, known, first, count, CHUNK)
        ties = (there & (bits == bar.to(bits.dtype))).to(tl.int32)
        among_ties = tied + tl.cumsum(ties, 0) - ties
        chosen = ((there & (bits > bar.to(bits.dtype))) | ((ties > 0) & (among_ties < left))).to(tl.int32)
        place = tl.load(begin + vector) + taken + tl.cumsum(chosen, 0) - chosen
        tl.store(indices + place, tl.load(origin + vector).to(tl.int32) + index, mask=chosen > 0)
        tl.store(values + place, element, mask=chosen > 0)
        taken += tl.sum(chosen, 0)
        tied += tl.sum(ties, 0)

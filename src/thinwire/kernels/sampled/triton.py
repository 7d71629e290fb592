"""Several vectors in two launches: sampled, and then summed and searched in the same pass.

Of each vector's sample one program finds the threshold, before anything is summed; the sums of a large sample are made
by a launch of its own. Then each program keeps the picks of a tile, in rows that lie in whatever order programs came.
The last program of a vector to end brings its rows in order, and leaves out what is too much. So neither the threshold
nor the number of picks reaches the host.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate as running
from typing import Any

import torch
import triton
import triton.language as tl

from thinwire.kernels.accumulate.triton import accumulate, arguments_of_each, of_vector, summed, total
from thinwire.kernels.hashing.triton import elements, hold
from thinwire.kernels.parts import Fit, Found, Ints, Regions
from thinwire.kernels.places.triton import edges_until
from thinwire.kernels.replay import fixed
from thinwire.kernels.sampled import reference
from thinwire.kernels.sampled.reference import Draw, one_by_one, written
from thinwire.kernels.select.triton import (
    BINS,
    LEVELS,
    accumulate_select,
    digits_below,
    largest,
    largest_of_each,
    next_digit,
)
from thinwire.kernels.sums import Sum
from thinwire.kernels.triton import (
    TILE,
    addresses,
    fitting,
    launch,
    magnitudes,
    table_of,
    tiles_of,
    tiles_of_each,
)

_BLOCK = 1024
_CHUNK = 2 * TILE
_SMALL = 2 * _CHUNK
"""Sums of a sample of so many elements are made by one program."""
_MANY = 1 << 16
_SURE = 80


def accumulate_sampled_select(sums: Sum, draws: Sequence[Draw], fit: Fit | None = None) -> Found:
    if sums.how == "rounded":  # the sample is taken before that
        return one_by_one(sums, draws, accumulate_select, largest, fit)
    return _found(sums, draws, fit, exact=False)


def accumulate_largest_of_each(
    sums: Sum, counts: Sequence[int], firsts: Sequence[int] = (), fit: Fit | None = None
) -> Found:
    """See `reference.accumulate_largest_of_each`. Where many are wanted of many, histograms are faster."""
    wanted = [(x.numel(), min(k, x.numel())) for x, k in zip(sums.outs, counts, strict=True)]
    if any(n > _MANY < 16 * k and n < 16 * k for n, k in wanted):
        accumulate(sums)
        return written(*largest_of_each(sums.outs, counts, firsts), fit)
    each = zip(wanted, firsts or [0] * len(wanted), strict=True)
    return _found(sums, [_surely(n, k, first) for (n, k), first in each], fit, exact=True)


@lru_cache(maxsize=4096)
def _surely(numel: int, wanted: int, first: int) -> Draw:
    """Return a draw whose threshold twice as many reach as are wanted: of random numbers, 6 in 10⁹ have too few.

    A prime stride walks through all columns of nearly every matrix.
    """
    if 2 * wanted >= numel:
        return Draw(0, 1, 0, wanted, first)
    stride = max(1, 2 * wanted // _SURE)
    while any(stride % i == 0 for i in range(2, math.isqrt(stride) + 1)):
        stride -= 1
    return Draw(0, stride, -(-2 * wanted // stride), wanted, first)


def accumulate_hashed_slots(
    sums: Sum, draws: Sequence[Draw], slots: Ints, seeds: Ints, regions: Regions, fit: Fit | None = None
) -> Found:
    """See `reference.accumulate_hashed_slots`: picks go to their slots at once."""
    if sums.how == "rounded":
        return reference.accumulate_hashed_slots(sums, draws, slots, seeds, regions, fit)
    return _found(sums, draws, fit, exact=False, hashed=(slots, seeds, [offset for offset, _ in regions]))


def _found(
    sums: Sum, draws: Sequence[Draw], fit: Fit | None, *, exact: bool, hashed: tuple[Ints, Ints, Ints] = ((), (), ())
) -> Found:
    """Pick; if `exact`, the largest of all elements even where too few reach the threshold.

    With `hashed` (slots, seeds and offsets), return what lies in the slots.
    """
    xs = sums.outs
    like, device, lengths = xs[0], xs[0].device, [x.numel() for x in xs]
    known = fixed(draws)  # of which is taken what is the same in every step, or only says how much room there is
    capacities = [draw.capacity for draw in known]
    rooms = [draw.room(n) for draw, n in zip(known, lengths, strict=True)]
    most = tuple(-(-n // draw.stride) for n, draw in zip(lengths, known, strict=True))
    starts, begins, drawn_at = (list(running(each[:-1], initial=0)) for each in (capacities, rooms, most))
    where, (slots, seeds, origins) = addresses(xs), hashed
    slots_at, counters = list(running(slots[:-1], initial=0)), 2 + 2 * len(xs)

    def columns() -> Sequence[Any]:
        now = list(draws)
        sampled = [-(-(n - draw.offset) // draw.stride) for n, draw in zip(lengths, now, strict=True)]
        offsets, strides, ranks, _, firsts, lasts = zip(*now, strict=True)
        drawn = (sampled, offsets, strides, drawn_at, ranks)
        rest = (slots, list(seeds), slots_at, origins) if slots else ()
        return (*drawn, where, lengths, capacities, starts, rooms, begins, firsts, lasts, *rest)

    table = table_of(device, columns)
    *drawn, rank, at, size, capacity, start, room, begin, first, last = table[:13]
    sizes, of_each = {"LEVELS": LEVELS[like.element_size()], "HOW": sums.how}, arguments_of_each(sums)
    zeros = torch.empty(counters + 2 * sum(slots), dtype=torch.int32, device=device)
    bars, held = torch.empty_like(drawn[0]), zeros[counters:].view(torch.int64) if slots else None
    sample, alone = like.new_empty(sum(most)), max(most) <= _SMALL
    if not alone:
        tiles = tiles_of_each(most, device, _BLOCK)
        launch(_sample, len(tiles), sample, like, *of_each, *drawn, tiles, BLOCK=_BLOCK, HOW=sums.how)
    args = (bars, like, *of_each, *drawn, rank, sample, zeros, zeros.numel())
    launch(_threshold, len(xs), *args, **sizes, ALONE=alone, CHUNK=_CHUNK, num_warps=16)
    tiles = tiles_of_each(tuple(lengths), device)
    rows, candidates = zeros.new_empty(2, len(tiles)), zeros.new_empty(sum(rooms))
    fit = fit or Fit(like.dtype)
    indices, values = zeros.new_empty(sum(capacities)), like.new_empty(sum(capacities), dtype=fit.dtype)
    found = (*zeros[2:counters].view(2, -1), *rows, candidates, like.new_empty(sum(rooms)))
    carried, steps = zeros[:2].view(torch.int64)[0], tiles_of(max(lengths), TILE).bit_length()
    hashing = table[13:16] if slots else (None, None, None)
    places = (at, size, capacity, start, room, begin, first, last, tiles, held, *hashing)
    args = (indices, values, carried, fit.bound, like, *of_each, *found, bars, *places)
    launch(_find, len(tiles), *args, **sizes, TILE=TILE, STEPS=steps, EXACT=exact, num_warps=8)
    if held is None:
        return Found(indices, values, carried)
    return elements(xs, carried, held, slots, fit, at, size, *table[13::2], table[16])


@triton.jit
def _summed_at(sample, like, gradient_like, sums, size, offset, stride, begin, vector, place, HOW: tl.constexpr):
    """Make sums at some places of a vector's sample. Return them, and which exist."""
    there = place < tl.load(size + vector)
    at = tl.load(offset + vector) + place * tl.load(stride + vector)
    x, _kept = summed(of_vector(like, gradient_like, sums, vector), at, there, HOW)
    tl.store(sample + tl.load(begin + vector) + place, x, mask=there)
    return x, there


@triton.jit
def _sample(
    sample, like, gradient_like, out, velocity_out, residual, velocity, gradient, scale, momentum,
    size, offset, stride, begin, tiles, HOW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    sums = out, velocity_out, residual, velocity, gradient, scale, momentum, 0, 0
    vector, place = tl.load(tiles + 3 * tl.program_id(0)), tl.load(tiles + 3 * tl.program_id(0) + 1)
    place += tl.arange(0, BLOCK)
    _summed_at(sample, like, gradient_like, sums, size, offset, stride, begin, vector, place, HOW)


@triton.jit
def _kth(x, count, left, LEVELS: tl.constexpr, CHUNK: tl.constexpr):
    """Return the left-th largest magnitude among so many elements, and how many of the largest equal it."""
    bar = left.to(tl.int64) * 0
    for level in tl.static_range(LEVELS):
        counts = tl.zeros([BINS], tl.int32)
        for first in range(0, count, CHUNK):
            place = first + tl.arange(0, CHUNK)
            number = tl.load(x + place, mask=place < count, other=0.0)
            counts += digits_below(number, place < count, bar, level, LEVELS)
        bar, left = next_digit(counts, bar, left)
    return bar, left


@triton.jit(do_not_specialize=["cleared"])
def _threshold(
    bars, like, gradient_like, out, velocity_out, residual, velocity, gradient, scale, momentum,
    size, offset, stride, begin, rank, sample, clear, cleared,
    HOW: tl.constexpr, ALONE: tl.constexpr, LEVELS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Write the least magnitude that is picked of a vector: the rank-th largest of its sample.

    ALONE: it makes the sample's sums, too.
    """
    sums = out, velocity_out, residual, velocity, gradient, scale, momentum, 0, 0
    vector, place = tl.program_id(0), tl.arange(0, CHUNK)
    for first in range(vector * CHUNK, cleared, tl.num_programs(0) * CHUNK):
        tl.store(clear + first + place, tl.zeros([CHUNK], tl.int32), mask=first + place < cleared)
    k = tl.load(rank + vector).to(tl.int32)
    count = tl.where(k > 0, tl.load(size + vector), 0).to(tl.int32)
    infinity = tl.sum(magnitudes(tl.full([1], float("inf"), like.dtype.element_ty)), 0)
    mine, top = sample + tl.load(begin + vector), infinity * 0
    for first in range(0, count, CHUNK):
        if ALONE:
            x, there = _summed_at(
                sample, like, gradient_like, sums, size, offset, stride, begin, vector, first + place, HOW
            )
        else:
            there = first + place < count
            x = tl.load(mine + first + place, mask=there)
        top = tl.maximum(top, tl.max(tl.where(there, magnitudes(x), 0), 0))
    tl.debug_barrier()  # the sample is there
    bar, _left = _kth(mine, count, k, LEVELS, CHUNK)
    least = tl.where(top > infinity, infinity.to(tl.int64), tl.maximum(bar, 1))
    tl.store(bars + vector, tl.where(k == 0, 1, least))


@triton.jit
def _find(
    indices, values, carried, bound,
    like, gradient_like, out, velocity_out, residual, velocity, gradient, scale, momentum,
    totals, ended, counts, rows, candidates, numbers, bars, at, size, capacity, start, room, begin, origin, padding,
    tiles, held, slots, seeds, slots_at,
    HOW: tl.constexpr, LEVELS: tl.constexpr, TILE: tl.constexpr, STEPS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Sum a tile, and keep its picks as candidates while there is room. The last of a vector's programs writes them.

    Those to be held in slots it only puts there.
    """
    tile, each = tl.program_id(0), tl.arange(0, TILE)
    vector, offset, first = tl.load(tiles + 3 * tile), tl.load(tiles + 3 * tile + 1), tl.load(tiles + 3 * tile + 2)
    sums = out, velocity_out, residual, velocity, gradient, scale, momentum, 0, 0
    n, most, least = tl.load(size + vector), tl.load(room + vector), tl.load(bars + vector)
    valid = offset + each < n
    element = total(of_vector(like, gradient_like, sums, vector), offset, each, valid, HOW)
    bits = magnitudes(element)
    hit = (valid & (bits >= least.to(bits.dtype))).to(tl.int32)
    row = tl.atomic_add(totals + vector, tl.sum(hit, 0), sem="relaxed")
    place = row + tl.cumsum(hit, 0) - 1
    there = (hit > 0) & (place < most)
    candidates += tl.load(begin + vector)
    numbers += tl.load(begin + vector)
    tl.store(candidates + place, offset + each, mask=there)
    tl.store(numbers + place, element, mask=there)
    tl.store(counts + tile, tl.sum(hit, 0))
    tl.store(rows + tile, row)
    tl.debug_barrier()  # all of it is there before it counts
    many = tl.cdiv(n, TILE).to(tl.int32)
    if tl.atomic_add(ended + vector, 1, sem="acq_rel") == many - 1:
        indices += tl.load(start + vector)
        values += tl.load(start + vector)
        wanted, last = tl.load(capacity + vector).to(tl.int32), tl.load(padding + vector).to(tl.int32)
        found = tl.atomic_add(totals + vector, 0, sem="relaxed")
        taken, more = _take(
            indices, values, bound, like, tl.load(at + vector), n.to(tl.int32), least, found, wanted, most,
            tl.load(origin + vector).to(tl.int32), candidates, numbers, counts + first, rows + first, many,
            held if held is None else held + tl.load(slots_at + vector),
            slots if slots is None else tl.load(slots + vector), seeds if seeds is None else tl.load(seeds + vector),
            LEVELS, TILE, TILE // 2, STEPS, EXACT,
        )  # fmt: skip
        if held is None:
            for missing in range(taken, wanted, TILE):
                there = missing + each < wanted
                tl.store(indices + missing + each, each * 0 + last, mask=there)
                tl.store(values + missing + each, tl.zeros([TILE], values.dtype.element_ty), mask=there)
            tl.atomic_add(carried, more.to(tl.int64), sem="relaxed")


@triton.jit
def _take(
    indices, values, bound, like, address, n, least, found, wanted, room, origin, candidates, numbers,
    counts, rows, many, held, slots, seed,
    LEVELS: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr, STEPS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Write a vector's candidates in order, or the largest of them; return how many, and how many are not 0.

    If there was no room for all, or too few reached the threshold, the largest of all elements, which takes longer.
    """
    before = found * 0
    for first in range(0, many, CHUNK):
        tile = first + tl.arange(0, CHUNK)
        count = tl.load(counts + tile, mask=tile < many, other=0)
        ends = before + tl.cumsum(count, 0)
        row = tl.load(rows + tile, mask=tile < many, other=0)
        tl.store(rows + tile, row - (ends - count), mask=tile < many)
        tl.store(counts + tile, ends, mask=tile < many)
        before += tl.sum(count, 0)
    tl.debug_barrier()  # the ends of the rows are there
    every, direct, left, bar = found > room, found * 0, found * 0, tl.cast(0, tl.int64)
    if EXACT:
        # If all candidates are all that is not 0, enough zeros lie among the first elements.
        few = found < wanted
        every |= few & (least > 1)
        left = tl.where(few, wanted - found, 0)
        direct = tl.where(few, wanted, 0)
    direct = tl.where(every, n, direct)
    count = tl.where(every, n, direct + found)
    x = address.to(tl.pointer_type(like.dtype.element_ty))
    if every | (found > wanted):
        among = tl.where(every, address, numbers.to(tl.int64)).to(tl.pointer_type(like.dtype.element_ty))
        bar, left = _kth(among, count, wanted, LEVELS, TILE)
    taken, tied, carried = found * 0, found * 0, found * 0
    for first in range(0, tl.where(wanted > 0, count, 0), CHUNK):
        place = first + tl.arange(0, CHUNK)
        there, later = place < count, (place < count) & (place >= direct)
        row = place - direct
        row += tl.load(rows + edges_until(counts, many, row, later, STEPS), mask=later, other=0)
        index = tl.where(later, tl.load(candidates + row, mask=later, other=0), place)
        number = tl.load(x + place, mask=there & (place < direct), other=0.0)
        element = tl.where(later, tl.load(numbers + row, mask=later, other=0.0), number)
        bits, there = magnitudes(element), there & ((place < direct) | (index >= direct))
        ties = (there & (bits == bar.to(bits.dtype))).to(tl.int32)
        among_ties = tied + tl.cumsum(ties, 0) - ties
        chosen = ((there & (bits > bar.to(bits.dtype))) | ((ties > 0) & (among_ties < left))).to(tl.int32)
        to = taken + tl.cumsum(chosen, 0) - chosen
        if held is None:
            value = fitting(element, bound, values)
            tl.store(indices + to, origin + index, mask=chosen > 0)
            tl.store(values + to, value, mask=chosen > 0)
            bits = magnitudes(value)
        else:
            hold(held, index.to(tl.int64), element, chosen > 0, n, slots, seed)
        taken += tl.sum(chosen, 0)
        tied += tl.sum(ties, 0)
        carried += tl.sum(tl.where(bits > 0, chosen, 0), 0)
    return taken, carried

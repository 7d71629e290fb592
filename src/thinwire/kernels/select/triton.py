"""Picking large magnitudes, while the host does not know how many there are.

Every tile's program counts its picks and keeps the first few of them. A second kernel joins them: the counts of earlier
tiles say where a tile's picks go. If there are more than `capacity`, it does nothing, and `write_largest` picks the
largest.

`write_largest` goes digit by digit: histograms of 8-bit digits give the k-th largest magnitude. Every program derives
it from them again, which takes a few loads and costs the host nothing. Integer sums are the same in any order, so
atomics are deterministic here. Of many elements a program takes a span of several tiles, so as to count them once.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.kernels.accumulate.triton import arguments, total
from thinwire.kernels.parts import Vectors, gather
from thinwire.kernels.select import reference
from thinwire.kernels.select.reference import INTEGERS, Picks
from thinwire.kernels.sums import Sum
from thinwire.kernels.triton import (
    PROGRAMS,
    TILE,
    addresses,
    launch,
    magnitudes,
    pointer,
    table,
    tiles_of,
    tiles_of_each,
    wide,
)

_DIGIT = 8  # bits: of more bins, counting and reading them takes longer than another pass over the elements
DIGIT, BINS = tl.constexpr(_DIGIT), tl.constexpr(1 << _DIGIT)
LEVELS = {2: 2, 4: 4, 8: 8}
"""How many digits a magnitude of so many bytes has."""
_ROOM = 64
"""How many picks of a tile are kept. A tile with more is searched again."""
_GROUP, _BLOCK = 32, 1024
_FEW = 1 << 25
"""Up to so many elements a program takes a tile."""
_TOGETHER = 256
"""How many tiles' counts are summed together."""
SHARED = tl.constexpr(_TOGETHER)


def select(x: Tensor, threshold: Tensor, capacity: int) -> Picks:
    """See `reference.select`. There are always `capacity` indices; the last ones may be −1."""
    return _select_as("given", x, (None, None, None, None, None, None, 0, 0), threshold, capacity)


def accumulate_select(sums: Sum, threshold: Tensor, capacity: int) -> Picks:
    """See `reference.accumulate_select`, and `select`."""
    return _select_as(sums.how, sums.outs[0], arguments(sums), threshold, capacity)


def largest(x: Tensor, k: int) -> Tensor:
    return largest_of_each([x], [k])[0]


def largest_of_each(xs: Sequence[Tensor], counts: Sequence[int], firsts: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
    like, device, lengths = xs[0], xs[0].device, [x.numel() for x in xs]
    wanted = [min(k, n) for k, n in zip(counts, lengths, strict=True)]
    starts = list(accumulate(wanted[:-1], initial=0))
    at, size, k, begin, first = table(device, addresses(xs), lengths, wanted, starts, firsts or [0] * len(xs))
    indices, values = torch.empty(sum(wanted), dtype=torch.int32, device=device), like.new_empty(sum(wanted))
    write_largest(xs, at, size, k, begin, (indices, values), first)
    return indices, values


def gather_each(xs: Sequence[Tensor], indices: Tensor, runs: Sequence[int]) -> Tensor:
    values = xs[0].new_empty(indices.numel())
    columns = table(values.device, addresses(xs), runs, list(accumulate(runs[:-1], initial=0)))
    tiles = tiles_of_each(tuple(runs), values.device, _BLOCK)
    launch(_gather_each, len(tiles), values, indices, *columns, tiles, BLOCK=_BLOCK)
    return values


def peak_of_each(xs: Sequence[Tensor]) -> Tensor:
    """See `reference.peak_of_each`. Torch has it in one launch, but for vectors without elements."""
    if not all(x.numel() for x in xs):
        return reference.peak_of_each(xs)
    return torch.stack(torch._foreach_norm(list(xs), torch.inf))


def write_largest(
    xs: Vectors, at: Tensor, size: Tensor, wanted: Tensor, starts: Tensor, out: Vectors, firsts: Tensor | None = None
) -> None:
    """Write the indices and values of the wanted[i] largest of each vector, from place starts[i] on.

    Histograms count the first digits of magnitudes, then the next ones of those that may be the wanted[i]-th largest.
    `at` and `size` are where the vectors begin and how long they are. Indices count from 0, or from firsts[i] on.
    """
    like, lengths = xs[0], [x.numel() for x in xs]
    total, levels = sum(lengths), LEVELS[like.element_size()]
    span = TILE if total <= _FEW else TILE * tiles_of(total, TILE * PROGRAMS)
    tiles, counters = tiles_of_each(tuple(lengths), at.device, span), len(xs) * (levels << _DIGIT)
    zeros = torch.zeros(counters + 2 * tiles_of(len(tiles), _TOGETHER), dtype=torch.int32, device=at.device)
    histograms, sums = zeros[:counters], zeros[counters:].view(torch.int64)
    for level in range(levels):
        digits = (histograms, like, at, size, wanted, tiles, level, span)
        launch(_count_digits_each, len(tiles), *digits, LEVELS=levels, TILE=TILE, num_warps=8)
    counts = torch.empty(len(tiles), dtype=torch.int64, device=like.device)
    args = (histograms, like, at, size, wanted, tiles, counts, sums, span)
    launch(_count_each, len(tiles), *args, LEVELS=levels, TILE=TILE, num_warps=8)
    launch(_place_each, len(tiles), *args, starts, firsts, *out, LEVELS=levels, TILE=TILE, num_warps=8)


def _select_as(how: str, x: Tensor, rest: tuple[Any, ...], threshold: Tensor, capacity: int) -> Picks:
    """Accumulate into x (`rest` are the other arguments of `total`), or take x as given; then select from it."""
    n, tiles = x.numel(), tiles_of(x.numel())
    picks = torch.full((capacity,), -1, dtype=torch.int32, device=x.device)
    if not n:
        return Picks(picks, x.new_zeros(capacity), x.new_zeros(()))
    counts, peaks = picks.new_empty(tiles), picks.new_empty(tiles, dtype=INTEGERS[x.element_size()])
    kept = picks.new_empty(tiles, _ROOM)
    state = (threshold.to(x), n, counts, peaks, kept)
    launch(_find, tiles, x, *rest, *state, HOW=how, TILE=TILE, ROOM=_ROOM, num_warps=8)
    ends = counts.cumsum(0, dtype=torch.int32)
    sizes = {"TILE": TILE, "ROOM": _ROOM, "GROUP": _GROUP, "num_warps": 8}
    wanted = torch.empty(1, dtype=torch.int64, device=x.device)
    args = (picks, wanted, x, threshold.to(x), n, counts, ends, kept, tiles, capacity)
    launch(_gather, tiles_of(tiles, _GROUP), *args, **sizes)
    at, size, begin = table(x.device, addresses([x]), [n], [0])
    write_largest([x], at, size, wanted, begin, (picks, x.new_empty(capacity)))
    return Picks(picks, gather(x, picks), peaks.amax().view(x.dtype))


@triton.jit
def bar_of(histograms, k, levels):
    """Return the first digits of the k-th largest, and how many of the k largest share them."""
    bar, left = k.to(tl.int64) * 0, k.to(tl.int32)
    for level in range(levels):
        bar, left = next_digit(tl.load(histograms + level * BINS + tl.arange(0, BINS)), bar, left)
    return bar, left


@triton.jit
def next_digit(histogram, bar, left):
    """Return one more of the first digits of the left-th largest, and how many of the largest share them."""
    above = tl.sum(histogram, 0) - tl.cumsum(histogram, 0)
    digit = tl.sum((above >= left).to(tl.int32), 0)
    left -= tl.sum(tl.where(tl.arange(0, BINS) == digit, above, 0), 0)
    return (bar << DIGIT) + digit, left


@triton.jit
def digits_below(x, valid, bar, level, LEVELS: tl.constexpr):
    """Return how often each next digit occurs among magnitudes whose first ones are those of the bar."""
    bits = magnitudes(x)
    digits = bits >> (DIGIT * (LEVELS - 1 - level))
    valid = valid & ((digits >> DIGIT) == bar.to(bits.dtype))
    return tl.histogram((digits & (BINS - 1)).to(tl.int32), BINS, mask=valid)


@triton.jit
def _hits(bits, valid, threshold):
    # The mask is needed: beyond the end, zero times a scale that is not finite is NaN.
    least = wide(tl.load(threshold))
    least = tl.where(least != least, float("inf"), least)
    return (valid & (bits >= tl.maximum(magnitudes(least.to(threshold.dtype.element_ty)), 1))).to(tl.int32)


@triton.jit(do_not_specialize=["high", "low"])
def _find(
    x, velocity_out, residual, velocity, gradient, scale, momentum, high, low, threshold, n, counts, peaks, kept,
    HOW: tl.constexpr, TILE: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    start = tile.to(tl.int64) * TILE
    at = tl.arange(0, TILE)
    valid = at < n - start
    sums = x, velocity_out, residual, velocity, gradient, scale, momentum, high, low
    bits = magnitudes(total(sums, start, at, valid, HOW))
    hit = _hits(bits, valid, threshold)
    rank = tl.cumsum(hit, 0) - 1
    tl.store(kept + tile * ROOM + rank, (start + at).to(tl.int32), mask=(hit > 0) & (rank < ROOM))
    tl.store(counts + tile, tl.sum(hit, 0))
    tl.store(peaks + tile, tl.max(tl.where(valid, bits, 0), 0).to(peaks.dtype.element_ty))


@triton.jit(do_not_specialize=["tiles", "capacity"])
def _gather(
    picks, wanted, x, threshold, n, counts, ends, kept, tiles, capacity,
    TILE: tl.constexpr, ROOM: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    total = tl.load(ends + tiles - 1)
    if tl.program_id(0) == 0:
        tl.store(wanted, tl.where(total > capacity, capacity, 0).to(tl.int64))
    if total > capacity:
        return
    first = tl.program_id(0) * GROUP
    rows = first + tl.arange(0, GROUP)
    count = tl.load(counts + rows, mask=rows < tiles, other=0)
    begin = tl.load(ends + rows, mask=rows < tiles, other=0) - count
    rank = tl.arange(0, ROOM)[None, :]
    there = (rank < count[:, None]) & (count <= ROOM)[:, None]
    found = tl.load(kept + rows[:, None] * ROOM + rank, mask=there)
    tl.store(picks + begin[:, None] + rank, found, mask=there)
    if tl.max(count, 0) > ROOM:
        for tile in range(first, tl.minimum(first + GROUP, tiles)):
            count_here = tl.load(counts + tile)
            if count_here > ROOM:
                start = tl.cast(tile, tl.int64) * TILE  # in the interpreter a loop's tile is a plain number
                at = tl.arange(0, TILE)
                valid = at < n - start
                hit = _hits(magnitudes(tl.load(x + start + at, mask=valid)), valid, threshold)
                place = tl.load(ends + tile) - count_here + tl.cumsum(hit, 0) - 1
                tl.store(picks + place, (start + at).to(tl.int32), mask=hit > 0)


@triton.jit
def _gather_each(values, indices, address, size, start, tiles, BLOCK: tl.constexpr):
    vector = tl.load(tiles + 3 * tl.program_id(0))
    within = tl.load(tiles + 3 * tl.program_id(0) + 1) + tl.arange(0, BLOCK)
    there, at = within < tl.load(size + vector), tl.load(start + vector) + within
    index = tl.load(indices + at, mask=there, other=0)
    tl.store(values + at, tl.load(pointer(address, vector, values) + index, mask=there), mask=there)


@triton.jit(do_not_specialize=["level", "span"])
def _count_digits_each(
    histograms, like, at, size, wanted, tiles, level, span,
    LEVELS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    vector = tl.load(tiles + 3 * tl.program_id(0))
    k = tl.load(wanted + vector)
    if k == 0:
        return
    mine = histograms + vector * LEVELS * BINS
    bar, _left = bar_of(mine, k, level)
    x, counts = pointer(at, vector, like), tl.zeros([BINS], tl.int32)
    for first in range(0, span, TILE):
        place = tl.load(tiles + 3 * tl.program_id(0) + 1).to(tl.int64) + first + tl.arange(0, TILE)
        valid = place < tl.load(size + vector)
        counts += digits_below(tl.load(x + place, mask=valid), valid, bar, level, LEVELS)
    tl.atomic_add(mine + level * BINS + tl.arange(0, BINS), counts, mask=counts > 0, sem="relaxed")


@triton.jit
def _above_and_ties_each(like, at, size, vector, start, bar, TILE: tl.constexpr):
    place = start + tl.arange(0, TILE)
    valid = place < tl.load(size + vector)
    x = tl.load(pointer(at, vector, like) + place, mask=valid)
    bits = magnitudes(x)
    bar = bar.to(bits.dtype)
    return (valid & (bits > bar)).to(tl.int32), (valid & (bits == bar)).to(tl.int32), place, x


@triton.jit
def _counted_before(counts, sums, tile):
    """Return what all tiles before this one count."""
    each = tl.arange(0, SHARED)
    group, found = tile // SHARED, tl.zeros([SHARED], counts.dtype.element_ty)
    for first in range(0, group, SHARED):
        found += tl.load(sums + first + each, mask=first + each < group, other=0)
    found += tl.load(counts + group * SHARED + each, mask=group * SHARED + each < tile, other=0)
    return tl.sum(found, 0)


@triton.jit
def _packed(above, ties):
    return (tl.sum(above, 0).to(tl.int64) << 32) + tl.sum(ties, 0)


@triton.jit(do_not_specialize=["span"])
def _count_each(
    histograms, like, at, size, wanted, tiles, counts, sums, span, LEVELS: tl.constexpr, TILE: tl.constexpr
):
    tile = tl.program_id(0)
    vector, start = tl.load(tiles + 3 * tile), tl.load(tiles + 3 * tile + 1)
    k, count = tl.load(wanted + vector), tl.cast(0, tl.int64)
    if k > 0:
        bar, _left = bar_of(histograms + vector * LEVELS * BINS, k, LEVELS)
        for first in range(0, span, TILE):
            above, ties, _index, _x = _above_and_ties_each(like, at, size, vector, start + first, bar, TILE)
            count += _packed(above, ties)
    tl.store(counts + tile, count)
    tl.atomic_add(sums + tile // SHARED, count, sem="relaxed")  # of those that lie side by side


@triton.jit(do_not_specialize=["span"])
def _place_each(
    histograms, like, at, size, wanted, tiles, counts, sums, span, starts, firsts, indices, values,
    LEVELS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    vector, start, first = tl.load(tiles + 3 * tile), tl.load(tiles + 3 * tile + 1), tl.load(tiles + 3 * tile + 2)
    k = tl.load(wanted + vector)
    if k == 0:
        return
    bar, allowed = bar_of(histograms + vector * LEVELS * BINS, k, LEVELS)
    begin, before = tl.load(starts + vector), _counted_before(counts, sums, tile)
    before -= _counted_before(counts, sums, first)
    for part in range(0, span, TILE):
        above, ties, index, x = _above_and_ties_each(like, at, size, vector, start + part, bar, TILE)
        within = tl.cumsum((above << 16) + ties, 0)
        ties_before = (before & 0xFFFFFFFF).to(tl.int32) + (within & 0xFFFF) - ties
        place = (before >> 32).to(tl.int32) + (within >> 16) - above + tl.minimum(ties_before, allowed)
        taken = (above > 0) | ((ties > 0) & (ties_before < allowed))
        if firsts is not None:
            index += tl.load(firsts + vector).to(tl.int32)
        tl.store(indices + begin + place, index, mask=taken)
        tl.store(values + begin + place, x, mask=taken)
        before += _packed(above, ties)

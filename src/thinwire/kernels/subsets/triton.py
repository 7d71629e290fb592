"""Sorted positions as numbers of a few bits, and back: each byte, and each number, by itself.

A launch takes all runs, each with its own numbering. A table on the device has a row for each run, and the binomials.
"""

from itertools import accumulate

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.kernels.memory import kept, sent
from thinwire.kernels.subsets.reference import Numbered, Numbering, digits_of
from thinwire.kernels.triton import launch, tiles_of_each

_BLOCK = 128
FIELDS = tl.constexpr(12)
Runs = tuple[Numbered, ...]


def subsets_encode(positions: Tensor, runs: Runs) -> Tensor:
    lengths = tuple(run.regions * run.nbytes for run in runs)
    out, tiles = positions.new_empty(sum(lengths), dtype=torch.uint8), tiles_of_each(lengths, positions.device, _BLOCK)
    args = (out, positions.contiguous(), _table(runs, positions.device), tiles)
    launch(_number, len(tiles), *args, DIGITS=_digits(runs), BLOCK=_BLOCK)
    return out


def subsets_decode(rows: Tensor, count: int, numbering: Numbering) -> Tensor:
    return _read(rows, (Numbered(numbering, 1, count),), checked=False)[0]


def subsets_read(rows: Tensor, runs: Runs) -> tuple[Tensor, Tensor]:
    return _read(rows, runs, checked=True)


def _read(rows: Tensor, runs: Runs, *, checked: bool) -> tuple[Tensor, Tensor]:
    tiles = tiles_of_each(tuple(run.regions * run.numbers for run in runs), rows.device, _BLOCK)
    programs, (ranks, count) = len(tiles), (len(rows), sum(run.positions for run in runs))
    positions = torch.empty(ranks, count, dtype=torch.int16, device=rows.device)
    wrong = torch.empty(ranks * programs, dtype=torch.bool, device=rows.device)
    args = (rows, positions, _table(runs, rows.device), tiles, wrong, programs, count, rows.stride(0))
    launch(_subset, ranks * programs, *args, CHECKED=checked, DIGITS=_digits(runs), BLOCK=_BLOCK)
    return positions, wrong


def _digits(runs: Runs) -> int:
    return max((run.numbering.digits for run in runs), default=1)


@kept
def _table(runs: Runs, device: torch.device) -> Tensor:
    """Return a row of numbers for each run, int64, and behind them all binomials, of as many digits as any run has."""
    binomials = {numbering: numbering.binomials(_digits(runs)).reshape(-1) for numbering, *_ in runs}
    ends = accumulate(map(len, binomials.values()), initial=len(runs) * FIELDS.value)
    starts, first, begin, rows = dict(zip(binomials, ends, strict=False)), 0, 0, list[int]()
    for run in runs:
        numbering, regions, count = run
        rows += [first, begin, starts[numbering], regions, count, run.nbytes]
        rows += [numbering.kept, numbering.space, numbering.bits, *digits_of(numbering.subsets, 2)]
        rows.append(numbering.space.bit_length())
        first, begin = first + run.positions, begin + regions * run.nbytes
    return sent(torch.from_numpy(np.concatenate([np.array(rows, np.int64), *binomials.values()])), device)


@triton.jit
def _run_of(table, tiles, tile):
    """Return a run's row; how many positions a number has, of how many, and its bits; and where the tile begins."""
    run = table + tl.load(tiles + 3 * tile) * FIELDS
    kept, space, bits = tl.load(run + 6).to(tl.int32), tl.load(run + 7).to(tl.int32), tl.load(run + 8).to(tl.int32)
    return run, kept, space, bits, tl.load(tiles + 3 * tile + 1).to(tl.int64)


@triton.jit
def _number(out, positions, table, tiles, DIGITS: tl.constexpr, BLOCK: tl.constexpr):
    """Write bytes, each from the numbers that overlap it. Digits have 63 bits: a sum that carries is negative."""
    run, kept, space, bits, begin = _run_of(table, tiles, tl.program_id(0))
    positions += tl.load(run)
    binomials, count, nbytes = table + tl.load(run + 2), tl.load(run + 4), tl.load(run + 5)
    at, n = begin + tl.arange(0, BLOCK), tl.load(run + 3) * nbytes
    bit = at % nbytes * 8
    first, before = bit // bits, at // nbytes * count  # in a region, and in those before it
    skipped = bit - first * bits
    byte = tl.zeros([BLOCK], tl.int64)
    for j in range((8 + bits - 2) // bits + 1):
        there = (at < n) & (first + j < count)
        low, high = tl.zeros([BLOCK], tl.int64), tl.zeros([BLOCK], tl.int64)
        for i in range(kept):
            position = tl.load(positions + (before + first + j) * kept + i, mask=there, other=0)
            place = binomials + i * space + position.to(tl.int64)
            low += tl.load(place, mask=there, other=0)
            if DIGITS > 1:
                high += tl.load(place + kept * space, mask=there, other=0) + (low < 0).to(tl.int64)
                low &= 0x7FFFFFFFFFFFFFFF
        ahead = j * bits - skipped
        back = tl.maximum(-ahead, 0)
        moved = tl.where(ahead < 0, low >> tl.minimum(back, 63), low << tl.minimum(tl.maximum(ahead, 0), 8))
        if DIGITS > 1:
            beyond = tl.where(back < 63, high << tl.maximum(-(back - 63), 0), high >> tl.maximum(back - 63, 0))
            moved |= tl.where(ahead < 0, beyond, 0)
        byte |= moved & 0xFF
    tl.store(out + tl.load(run + 1) + at, byte.to(tl.uint8), mask=at < n)


@triton.jit(do_not_specialize=["programs", "total", "stride"])
def _subset(
    rows, positions, table, tiles, wrong, programs, total, stride,
    CHECKED: tl.constexpr, DIGITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Read numbers, and find the positions of each from the last one on: −1 if it has none, or stray bits behind it.

    A digit that borrows is negative. If CHECKED, it is 0 instead, and said in `wrong`.
    """
    rank = (tl.program_id(0) // programs).to(tl.int64)
    run, kept, space, bits, begin = _run_of(table, tiles, tl.program_id(0) % programs)
    binomials, count, nbytes = table + tl.load(run + 2), tl.load(run + 4), tl.load(run + 5)
    positions += rank * total + tl.load(run)
    at = begin + tl.arange(0, BLOCK)
    there = at < tl.load(run + 3) * count
    bit = at % count * bits
    row = rank * stride + tl.load(run + 1) + at // count * nbytes
    byte_at, skipped = row + bit // 8, bit % 8
    rest, rest_high = tl.zeros([BLOCK], tl.int64), tl.zeros([BLOCK], tl.int64)
    for j in range((bits + 14) // 8):
        ahead = 8 * j - skipped
        inside = there & (ahead < bits)
        byte = tl.load(rows + byte_at + j, mask=inside, other=0).to(tl.int64)
        rest |= tl.where(ahead < 0, byte >> tl.maximum(-ahead, 0), byte << tl.minimum(tl.maximum(ahead, 0), 63))
        if DIGITS > 1:
            over = tl.maximum(ahead - 63, 0)
            rest_high |= tl.where(ahead < 63, byte >> tl.maximum(tl.minimum(-(ahead - 63), 8), 0), byte << over)
    ones = tl.full([BLOCK], 0x7FFFFFFFFFFFFFFF, tl.int64)
    rest &= ones >> tl.maximum(63 - bits, 0)
    rest_high &= ones >> tl.minimum(126 - bits, 63)
    subsets, subsets_high = tl.load(run + 9), tl.load(run + 10)
    beyond = (rest_high > subsets_high) | ((rest_high == subsets_high) & (rest >= subsets))
    last, end = there & (at % count == count - 1), count * bits  # it looks at what is behind it, too
    for place in range(end // 8, nbytes):
        byte = tl.load(rows + row + place, mask=last, other=0).to(tl.int64)
        beyond |= last & (byte >> tl.where(place == end // 8, end % 8, 0) != 0)
    none = -1
    if CHECKED:
        none = 0
        tl.store(wrong + tl.program_id(0), tl.max((beyond & there).to(tl.int32), 0) > 0)
    high, steps = tl.full([BLOCK], 0, tl.int32) + space, tl.load(run + 11).to(tl.int32)
    for i in range(kept):
        ascending, low = binomials + (kept - 1 - i) * space, tl.zeros([BLOCK], tl.int32)
        for _ in range(steps):
            middle = (low + high) // 2
            number = tl.load(ascending + middle, mask=there, other=0)
            within = number <= rest
            if DIGITS > 1:
                number_high = tl.load(ascending + kept * space + middle, mask=there, other=0)
                within = (number_high < rest_high) | ((number_high == rest_high) & within)
            low, high = tl.where(within, middle, low), tl.where(within, high, middle)
        high = low
        rest -= tl.load(ascending + low, mask=there, other=0)
        if DIGITS > 1:
            rest_high -= tl.load(ascending + kept * space + low, mask=there, other=0) + (rest < 0).to(tl.int64)
            rest &= 0x7FFFFFFFFFFFFFFF
        tl.store(positions + at * kept + kept - 1 - i, tl.where(beyond, none, low).to(tl.int16), mask=there)

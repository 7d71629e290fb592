"""Sorted positions as numbers of a few bits, and back: each byte, and each number, by itself."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.kernels.subsets.reference import Numbering, digits_of
from thinwire.kernels.triton import launch, tiles_of

_BLOCK = 128


def subsets_encode(positions: Tensor, numbering: Numbering) -> Tensor:
    count = positions.shape[1] // numbering.kept
    out = positions.new_empty(len(positions), -(-count * numbering.bits // 8), dtype=torch.uint8)
    sizes_of = (out.numel(), count, out.shape[1], numbering.kept, numbering.space)
    args = (out, positions.contiguous(), numbering.table(positions), *sizes_of)
    sizes = {"BITS": numbering.bits, "DIGITS": numbering.digits, "BLOCK": _BLOCK}
    launch(_number, tiles_of(out.numel(), _BLOCK), *args, **sizes)
    return out


def subsets_decode(rows: Tensor, count: int, numbering: Numbering) -> Tensor:
    return _read(rows, 1, count, numbering, None)


def subsets_read(rows: Tensor, regions: int, count: int, numbering: Numbering) -> tuple[Tensor, Tensor]:
    programs = tiles_of(rows.shape[0] * regions * count, _BLOCK)
    wrong = torch.empty(programs, dtype=torch.bool, device=rows.device)
    return _read(rows, regions, count, numbering, wrong), wrong


def _read(rows: Tensor, regions: int, count: int, numbering: Numbering, wrong: Tensor | None) -> Tensor:
    ranks, bits = rows.shape[0] * regions, numbering.bits
    positions = torch.empty(ranks, count * numbering.kept, dtype=torch.int16, device=rows.device)
    table = numbering.table(rows)
    args = (rows, positions, table, wrong, ranks * count, count, rows.shape[1] // regions, regions, rows.stride(0))
    limits = (*digits_of(numbering.subsets, 2), numbering.kept, numbering.space, numbering.space.bit_length())
    sizes = {"BITS": bits, "DIGITS": numbering.digits, "BLOCK": _BLOCK}
    launch(_subset, tiles_of(ranks * count, _BLOCK), *args, *limits, **sizes)
    return positions


@triton.jit(do_not_specialize=["n", "count", "nbytes", "kept", "space"])
def _number(
    out, positions, table, n, count, nbytes, kept, space,
    BITS: tl.constexpr, DIGITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write bytes, each from the numbers that overlap it. Digits have 63 bits: a sum that carries is negative."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    bit = at % nbytes * 8
    first, before = bit // BITS, at // nbytes * count  # in a row, and in the rows before it
    skipped = bit - first * BITS
    byte = tl.zeros([BLOCK], tl.int64)
    for j in range((8 + BITS - 2) // BITS + 1):
        there = (at < n) & (first + j < count)
        low, high = tl.zeros([BLOCK], tl.int64), tl.zeros([BLOCK], tl.int64)
        for i in range(kept):
            position = tl.load(positions + (before + first + j) * kept + i, mask=there, other=0)
            place = table + i * space + position.to(tl.int64)
            low += tl.load(place, mask=there, other=0)
            if DIGITS > 1:
                high += tl.load(place + kept * space, mask=there, other=0) + (low < 0).to(tl.int64)
                low &= 0x7FFFFFFFFFFFFFFF
        ahead = j * BITS - skipped
        back = tl.maximum(-ahead, 0)
        moved = tl.where(ahead < 0, low >> tl.minimum(back, 63), low << tl.minimum(tl.maximum(ahead, 0), 8))
        if DIGITS > 1:
            beyond = tl.where(back < 63, high << tl.maximum(-(back - 63), 0), high >> tl.maximum(back - 63, 0))
            moved |= tl.where(ahead < 0, beyond, 0)
        byte |= moved & 0xFF
    tl.store(out + at, byte.to(tl.uint8), mask=at < n)


@triton.jit(
    do_not_specialize=[
        "n", "count", "nbytes", "regions", "stride", "subsets", "subsets_high", "kept", "space", "steps"
    ]
)  # fmt: skip
def _subset(
    rows, positions, table, wrong, n, count, nbytes, regions, stride, subsets, subsets_high, kept, space, steps,
    BITS: tl.constexpr, DIGITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Read numbers, and find the positions of each from the last one on: −1 if it has none, or stray bits behind it.

    A digit that borrows is negative. With `wrong`, it is 0 instead, and said there.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = at < n
    bit = at % count * BITS
    row = at // count // regions * stride + at // count % regions * nbytes
    begin, skipped = row + bit // 8, bit % 8
    rest, rest_high = tl.zeros([BLOCK], tl.int64), tl.zeros([BLOCK], tl.int64)
    for j in range((BITS + 14) // 8):
        ahead = 8 * j - skipped
        inside = there & (ahead < BITS)
        byte = tl.load(rows + begin + j, mask=inside, other=0).to(tl.int64)
        rest |= tl.where(ahead < 0, byte >> tl.maximum(-ahead, 0), byte << tl.minimum(tl.maximum(ahead, 0), 63))
        if DIGITS > 1:
            over = tl.maximum(ahead - 63, 0)
            rest_high |= tl.where(ahead < 63, byte >> tl.maximum(tl.minimum(-(ahead - 63), 8), 0), byte << over)
    if DIGITS > 1:
        rest &= 0x7FFFFFFFFFFFFFFF
        rest_high &= (1 << (BITS - 63)) - 1
    else:
        rest &= (1 << BITS) - 1
    beyond = (rest_high > subsets_high) | ((rest_high == subsets_high) & (rest >= subsets))
    last, end = there & (at % count == count - 1), count.to(tl.int64) * BITS  # it looks at what is behind it, too
    for place in range(end // 8, nbytes):
        byte = tl.load(rows + row + place, mask=last, other=0).to(tl.int64)
        beyond |= last & (byte >> tl.where(place == end // 8, end % 8, 0) != 0)
    none = -1
    if wrong is not None:
        none = 0
        tl.store(wrong + tl.program_id(0), tl.max((beyond & there).to(tl.int32), 0) > 0)
    high = tl.full([BLOCK], 0, tl.int32) + space
    for i in range(kept):
        binomials, low = table + (kept - 1 - i) * space, tl.zeros([BLOCK], tl.int32)
        for _ in range(steps):
            middle = (low + high) // 2
            number = tl.load(binomials + middle, mask=there, other=0)
            within = number <= rest
            if DIGITS > 1:
                number_high = tl.load(binomials + kept * space + middle, mask=there, other=0)
                within = (number_high < rest_high) | ((number_high == rest_high) & within)
            low, high = tl.where(within, middle, low), tl.where(within, high, middle)
        high = low
        rest -= tl.load(binomials + low, mask=there, other=0)
        if DIGITS > 1:
            rest_high -= tl.load(binomials + kept * space + low, mask=there, other=0) + (rest < 0).to(tl.int64)
            rest &= 0x7FFFFFFFFFFFFFFF
        tl.store(positions + at * kept + kept - 1 - i, tl.where(beyond, none, low).to(tl.int16), mask=there)

"""Sorted positions as numbers of a few bits, and back: each byte, and each number, by itself.

Numbers of two digits are left to plain torch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.kernels.subsets import reference
from thinwire.kernels.subsets.numbering import Numbering
from thinwire.kernels.triton import launch, tiles_of

_BLOCK = 128


def subsets_encode(positions: Tensor, numbering: Numbering) -> Tensor:
    """See `reference.subsets_encode`."""
    if numbering.digits > 1:
        return reference.subsets_encode(positions, numbering)
    count = positions.numel() // numbering.kept
    out = torch.empty(-(-count * numbering.bits // 8), dtype=torch.uint8, device=positions.device)
    args = (out, positions, numbering.table(positions), count, out.numel(), numbering.kept, numbering.space)
    launch(_number, tiles_of(out.numel(), _BLOCK), *args, BITS=numbering.bits, BLOCK=_BLOCK)
    return out


def subsets_decode(rows: Tensor, count: int, numbering: Numbering) -> Tensor:
    """See `reference.subsets_decode`."""
    if numbering.digits > 1:
        return reference.subsets_decode(rows, count, numbering)
    ranks, bits = rows.shape[0], numbering.bits
    positions = torch.empty(ranks, count * numbering.kept, dtype=torch.int16, device=rows.device)
    wrong = torch.empty(ranks, count, dtype=torch.bool, device=rows.device)
    args = (rows, positions, wrong, numbering.table(rows), ranks * count, count, rows.shape[1])
    limits = (numbering.subsets, numbering.kept, numbering.space, numbering.space.bit_length())
    launch(_subset, tiles_of(ranks * count, _BLOCK), *args, *limits, BITS=bits, BLOCK=_BLOCK)
    padding = rows[:, count * bits // 8 :].clone()
    padding[:, :1] >>= count * bits % 8
    return positions.masked_fill_((wrong.any(1) | padding.bool().any(1))[:, None], -1)


@triton.jit(do_not_specialize=["count", "nbytes", "kept", "space"])
def _number(out, positions, table, count, nbytes, kept, space, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """Write bytes, each from the numbers that overlap it."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    first = at * 8 // BITS
    skipped = at * 8 - first * BITS
    byte = tl.zeros([BLOCK], tl.int64)
    for j in range((8 + BITS - 2) // BITS + 1):
        there = (at < nbytes) & (first + j < count)
        number = tl.zeros([BLOCK], tl.int64)
        for i in range(kept):
            high = tl.load(positions + (first + j) * kept + i, mask=there, other=0).to(tl.int64)
            number += tl.load(table + i * space + high, mask=there, other=0)
        ahead = j * BITS - skipped
        moved = tl.where(ahead < 0, number >> tl.maximum(-ahead, 0), number << tl.minimum(tl.maximum(ahead, 0), 8))
        byte |= moved & 0xFF
    tl.store(out + at, byte.to(tl.uint8), mask=at < nbytes)


@triton.jit(do_not_specialize=["n", "count", "nbytes", "subsets", "kept", "space", "steps"])
def _subset(
    rows,
    positions,
    wrong,
    table,
    n,
    count,
    nbytes,
    subsets,
    kept,
    space,
    steps,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Read numbers, and find the positions of each from the last one on."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = at < n
    bit = at % count * BITS
    begin, skipped = at // count * nbytes + bit // 8, bit % 8
    rest = tl.zeros([BLOCK], tl.int64)
    for j in range((BITS + 14) // 8):
        ahead = 8 * j - skipped
        inside = there & (ahead < BITS)
        byte = tl.load(rows + begin + j, mask=inside, other=0).to(tl.int64)
        rest |= tl.where(ahead < 0, byte >> tl.maximum(-ahead, 0), byte << tl.minimum(tl.maximum(ahead, 0), 63))
    rest &= (1 << BITS) - 1
    tl.store(wrong + at, rest >= subsets, mask=there)
    high = tl.full([BLOCK], 0, tl.int32) + space
    for i in range(kept):
        binomials, low = table + (kept - 1 - i) * space, tl.zeros([BLOCK], tl.int32)
        for _ in range(steps):
            middle = (low + high) // 2
            within = tl.load(binomials + middle, mask=there, other=0) <= rest
            low, high = tl.where(within, middle, low), tl.where(within, high, middle)
        high = low
        rest -= tl.load(binomials + low, mask=there, other=0)
        tl.store(positions + at * kept + kept - 1 - i, low.to(tl.int16), mask=there)

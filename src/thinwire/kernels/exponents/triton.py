"""The exponents of bfloat16 numbers in a prefix code, block by block."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.kernels.exponents.reference import CODED, LONGEST, starts_of
from thinwire.kernels.triton import launch, tiles_of

_LANES = 64


def exponents_encode(x: Tensor, codes: Tensor, nbytes: int) -> tuple[Tensor, Tensor, Tensor]:
    blocks = tiles_of(x.numel(), CODED)
    rest = torch.empty(x.numel(), dtype=torch.uint8, device=x.device)
    sizes = torch.empty(blocks, dtype=torch.int32, device=x.device)
    words = torch.zeros(nbytes // 4 + 2, dtype=torch.int32, device=x.device)
    launch(_sizes, blocks, x, codes, rest, sizes, x.numel(), CODED=CODED)
    launch(_encode, blocks, x, codes, starts_of(sizes), words, x.numel(), CODED=CODED)
    return rest, sizes.to(torch.int16), words.view(torch.uint8)[:nbytes]


def exponents_decode(out: Tensor, rest: Tensor, sizes: Tensor, stream: Tensor, table: Tensor) -> Tensor:
    """See `reference.exponents_decode`; each block is a lane."""
    starts, blocks = starts_of(sizes.to(torch.int64).clamp(min=0)), sizes.numel()
    good = torch.ones(max(1, blocks), dtype=torch.int32, device=out.device)
    args = (out, rest, sizes, starts, stream, table, good, out.numel(), stream.numel(), blocks)
    launch(_decode, tiles_of(blocks, _LANES), *args, CODED=CODED, LONGEST=LONGEST, LANES=_LANES)
    return good.bool().all()


@triton.jit
def _entries(x, codes, n, CODED: tl.constexpr):
    """Return a block's places, which exist, the numbers, and their codes' entries: of no length where there is none."""
    at = tl.program_id(0).to(tl.int64) * CODED + tl.arange(0, CODED)
    there = at < n
    number = tl.load(x + at, mask=there, other=0).to(tl.int32)
    return at, there, number, tl.load(codes + ((number >> 7) & 0xFF), mask=there, other=0)


@triton.jit
def _sizes(x, codes, rest, sizes, n, CODED: tl.constexpr):
    at, there, number, entry = _entries(x, codes, n, CODED)
    tl.store(rest + at, ((number & 0x7F) | ((number >> 8) & 0x80)).to(tl.uint8), mask=there)
    tl.store(sizes + tl.program_id(0), tl.sum(entry >> 16, 0))


@triton.jit
def _encode(x, codes, starts, words, n, CODED: tl.constexpr):
    _at, there, _number, entry = _entries(x, codes, n, CODED)
    length = entry >> 16
    bit = tl.load(starts + tl.program_id(0)) * 8 + (tl.cumsum(length, 0) - length)
    shifted = (entry & 0xFFFF).to(tl.int64) << (bit & 31)
    # Of bits that lie apart, the sum is the union.
    tl.atomic_add(words + (bit >> 5), (shifted & 0xFFFFFFFF).to(tl.int32), mask=there)
    tl.atomic_add(words + (bit >> 5) + 1, (shifted >> 32).to(tl.int32), mask=there & ((shifted >> 32) > 0))


@triton.jit
def _decode(
    out, rest, sizes, starts, stream, table, good, n, nbytes, blocks,
    CODED: tl.constexpr, LONGEST: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    lane = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    real = lane < blocks
    begin = tl.load(starts + lane, mask=real, other=0) * 8
    bit = begin
    for i in range(CODED):
        at = lane * CODED + i
        there = real & (at < n)
        byte = bit >> 3
        first = tl.load(stream + byte, mask=there & (byte < nbytes), other=0).to(tl.int32)
        second = tl.load(stream + byte + 1, mask=there & (byte + 1 < nbytes), other=0).to(tl.int32)
        third = tl.load(stream + byte + 2, mask=there & (byte + 2 < nbytes), other=0).to(tl.int32)
        window = (first | (second << 8) | (third << 16)) >> (bit & 7).to(tl.int32)
        entry = tl.load(table + (window & ((1 << LONGEST) - 1)), mask=there, other=0).to(tl.int32)
        low = tl.load(rest + at, mask=there, other=0).to(tl.int32)
        number = (low & 0x7F) | ((entry & 0xFF) << 7) | ((low & 0x80) << 8)
        tl.store(out + at, number.to(tl.int16), mask=there)
        bit += (entry >> 8).to(tl.int64)
    size = tl.load(sizes + lane, mask=real, other=0).to(tl.int64)
    fits = (bit == begin + size) & (((bit + 7) >> 3) <= nbytes)
    tl.store(good + lane, fits.to(tl.int32), mask=real)

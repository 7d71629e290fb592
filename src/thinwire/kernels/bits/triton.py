"""Packed numbers of a few bits each, and ascending indices."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.kernels.bits.reference import decoded, encoded
from thinwire.kernels.triton import launch, tiles_of

_BLOCK = 1024


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """See `reference.pack_bits`."""
    out = torch.empty(-(-codes.numel() * bits // 8), dtype=torch.uint8, device=codes.device)
    args = (codes, out, codes.numel(), out.numel())
    launch(_pack, tiles_of(out.numel(), _BLOCK), *args, BITS=bits, BLOCK=_BLOCK)
    return out


def unpack_bits(buffer: Tensor, count: int, bits: int, dtype: torch.dtype = torch.int16) -> Tensor:
    """See `reference.unpack_bits`."""
    codes = torch.empty(count, dtype=dtype, device=buffer.device)
    launch(_unpack, tiles_of(count, _BLOCK), buffer, codes, count, buffer.numel(), BITS=bits, BLOCK=_BLOCK)
    return codes


def elias_fano_encode(indices: Tensor, space: int) -> Tensor:
    """See `reference.elias_fano_encode`."""
    return encoded(indices, space, pack_bits)


def elias_fano_decode(buffer: Tensor, count: int, space: int) -> Tensor:
    """See `reference.elias_fano_decode`."""
    return decoded(buffer, count, space, pack_bits, unpack_bits)


def elias_fano_decode_rows(rows: Tensor, count: int, space: int) -> Tensor:
    """See `reference.elias_fano_decode_rows`."""
    return torch.stack([elias_fano_decode(row, count, space) for row in rows])


@triton.jit
def _pack(codes, out, count, nbytes, BITS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    first = at * 8 // BITS
    skipped = at * 8 - first * BITS
    byte = tl.zeros([BLOCK], tl.int64)
    for j in tl.static_range((8 + BITS - 2) // BITS + 1):  # a byte overlaps at most this many codes
        code = tl.load(codes + first + j, mask=(at < nbytes) & (first + j < count), other=0).to(tl.int64)
        byte |= ((code & ((1 << BITS) - 1)) << (j * BITS)) >> skipped
    tl.store(out + at, (byte & 255).to(tl.uint8), mask=at < nbytes)


@triton.jit
def _unpack(buffer, codes, count, nbytes, BITS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    first = at * BITS // 8
    word = tl.zeros([BLOCK], tl.int64)
    for j in tl.static_range((BITS + 14) // 8):  # a code overlaps at most this many bytes
        byte = tl.load(buffer + first + j, mask=(at < count) & (first + j < nbytes), other=0).to(tl.int64)
        word |= byte << (8 * j)
    code = (word >> (at * BITS - first * 8)) & ((1 << BITS) - 1)
    tl.store(codes + at, code.to(codes.dtype.element_ty), mask=at < count)

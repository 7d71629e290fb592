"""Packed numbers of a few bits each; ascending indices in little more than the fewest bits possible; and exponents.

Indices are in the code of Elias (1974) and Fano (1971). The exponents of bfloat16 numbers are in a prefix code. Such a
number is int16 `x` (n): a sign, 8 bits of exponent and 7 of mantissa. The sign and the mantissa are a byte of `rest`.
The codes of the exponents of each block of `CODED` numbers begin at a byte, and blocks follow one another. Codes are of
1 to `LONGEST` bits, and the first bit of a code comes first, in the code and in the byte.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.kernels.places.reference import misplaced

CODED = 512
"""Numbers whose codes are read one after another: blocks are read side by side."""
LONGEST = 12
_BITS = 16


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """Pack the low `bits` (1 to 31) of each code: uint8 (⌈n · bits / 8⌉), padded with zeros.

    Codes are uint8, int16 or int32. The least significant bit comes first, in the code and in the byte.
    """
    places = torch.arange(bits, dtype=torch.int32, device=codes.device)
    ones = ((codes.to(torch.int32)[:, None] >> places) & 1).to(torch.uint8).view(-1)
    ones = torch.nn.functional.pad(ones, (0, -ones.numel() % 8)).view(-1, 8)
    return (ones << torch.arange(8, dtype=torch.uint8, device=codes.device)).sum(1, dtype=torch.uint8)


def unpack_bits(buffer: Tensor, count: int, bits: int, dtype: torch.dtype = torch.int16) -> Tensor:
    """Return the `count` codes (not negative) that `pack_bits` packed into uint8 `buffer`, which may be longer.

    `dtype` (uint8, int16 or int32) has room for `bits` bits.
    """
    places = torch.arange(8, dtype=torch.uint8, device=buffer.device)
    ones = ((buffer[: -(-count * bits // 8), None] >> places) & 1).view(-1)[: count * bits].view(count, bits)
    weights = torch.arange(bits, dtype=torch.int32, device=buffer.device)
    return (ones.to(torch.int32) << weights).sum(1, dtype=torch.int32).to(dtype)


def ones(bits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return where the first `count` ones of `bits` (uint8, 0 or 1) are, and how many ones there are (0-dim).

    Places are int32 (count), and −1 for ones that are missing.
    """
    ranks = bits.cumsum(0, dtype=torch.int64) - 1
    ranks = torch.where((bits != 0) & (ranks < count), ranks, count)
    places = torch.full((count + 1,), -1, dtype=torch.int32, device=bits.device)
    every = torch.arange(bits.numel(), dtype=torch.int32, device=bits.device)
    return places.scatter_(0, ranks, every)[:count], bits.sum(dtype=torch.int64)


class EliasFano(NamedTuple):
    """How `count` indices below `space` are laid out: `low_bits` of each, packed, then their high parts in unary.

    Each of the two parts is padded to a multiple of 8 bytes.
    """

    low_bits: int
    unary_bits: int
    low_nbytes: int
    nbytes: int

    @classmethod
    @lru_cache(maxsize=1024)
    def of(cls, count: int, space: int) -> "EliasFano":
        """Return the layout. ⌊log₂(space / count)⌋ low bits are best, to a few hundredths of a bit per index."""
        if not count:
            return cls(0, 0, 0, 0)
        low_bits = max(1, space // count).bit_length() - 1
        unary_bits = count + (max(0, space - 1) >> low_bits)
        low_nbytes = -(-count * low_bits // 64) * 8
        return cls(low_bits, unary_bits, low_nbytes, low_nbytes + -(-unary_bits // 64) * 8)


class Section(NamedTuple):
    """Numbers that become bytes: as they are; packed as codes of `bits`; or as Elias-Fano code of indices < `space`."""

    x: Tensor
    bits: int = 0
    space: int = 0

    @property
    def nbytes(self) -> int:
        """How many bytes they become."""
        if self.space:
            return EliasFano.of(self.x.numel(), self.space).nbytes
        return -(-self.x.numel() * self.bits // 8) if self.bits else self.x.nbytes


def sections_write(out: Tensor, sections: Sequence[Section], starts: Sequence[int]) -> None:
    """Write each section to uint8 `out` from its start on, and zeros to the rest."""
    out.zero_()
    for (x, bits, space), start in zip(sections, starts, strict=True):
        found = elias_fano_encode(x, space) if space else pack_bits(x, bits) if bits else x.contiguous()
        if found.numel():  # an empty one may have any stride, and no bytes
            out[start : start + found.nbytes] = found.view(torch.uint8)


def elias_fano_encode(indices: Tensor, space: int) -> Tensor:
    """Write indices (int32, not descending, each in [0, space)) as uint8 (`EliasFano.nbytes`).

    First come the low bits of each index, packed; then a bitmap that has bit (index >> low bits) + i set for the i-th
    index. Each part is padded to a multiple of 8 bytes.
    """
    count = indices.numel()
    layout = EliasFano.of(count, space)
    out = torch.zeros(layout.nbytes, dtype=torch.uint8, device=indices.device)
    if layout.low_bits:
        lows = pack_bits(indices, layout.low_bits)
        out[: lows.numel()] = lows
    bits = torch.zeros(layout.unary_bits, dtype=torch.uint8, device=indices.device)
    bits.scatter_(0, (indices >> layout.low_bits) + torch.arange(count, device=indices.device), 1)
    unary = pack_bits(bits, 1)
    out[layout.low_nbytes : layout.low_nbytes + unary.numel()] = unary
    return out


def elias_fano_decode(rows: Tensor, count: int, space: int) -> Tensor:
    """Return the indices, int32 (n, count), that `elias_fano_encode` wrote: uint8 rows (n, `EliasFano.nbytes`), n ≥ 1.

    Any bytes may be given. If the encoder cannot have written a row, one of its indices is −1, or more of them: the
    unary part does not have `count` bits set, an index is `space` or more or below the one before it, or padding is not
    zero.
    """
    return torch.stack([_decoded(row, count, space) for row in rows])


def elias_fano_read(rows: Tensor, count: int, space: int, edges: Tensor) -> tuple[Tensor, Tensor]:
    """Return the same indices, and what `misplaced` says of them: each moved inside the last of the `edges` (int32)."""
    keys = elias_fano_decode(rows, count, space)
    inside = torch.empty_like(keys)
    return inside, misplaced(keys, edges, None, inside)


def _decoded(row: Tensor, count: int, space: int) -> Tensor:
    layout = EliasFano.of(count, space)
    places, found = ones(unpack_bits(row[layout.low_nbytes :], layout.unary_bits, 1, torch.uint8), count)
    high = (places - torch.arange(count, device=row.device)) << layout.low_bits
    if layout.low_bits:
        high += unpack_bits(row, count, layout.low_bits, torch.int32)
    wrong = (found != count) | ((high < 0) | (high >= space)).any() | (high[1:] < high[:-1]).any()
    indices = high.clamp(0, max(0, space - 1)).to(torch.int32)
    wrong |= (elias_fano_encode(indices, space) != row).any()
    return indices.masked_fill_(wrong, -1)


def exponents_count(x: Tensor) -> Tensor:
    """Return how often each exponent occurs: int64 (256)."""
    return torch.bincount((x.to(torch.int32) >> 7) & 0xFF, minlength=256)


def exponents_encode(x: Tensor, codes: Tensor, nbytes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return `rest` (uint8, n), how many bits each block takes (int16), and the blocks: uint8 (`nbytes`), zeros behind.

    `codes` (int32, 256) has a code, and from bit 16 on its length. All of x is in the code, and `nbytes` have room for
    it.
    """
    wide = x.to(torch.int32)
    entries = codes[(wide >> 7) & 0xFF]
    lengths = torch.nn.functional.pad(entries >> _BITS, (0, -x.numel() % CODED)).view(-1, CODED)
    ends = lengths.cumsum(1, dtype=torch.int64)
    starts = starts_of(ends[:, -1]) if len(ends) else ends
    at = (8 * starts[:, None] + ends - lengths).view(-1)[: x.numel()]
    words = torch.zeros(nbytes // 4 + 2, dtype=torch.int64, device=x.device)
    shifted = (entries & 0xFFFF).to(torch.int64) << (at & 31)
    words.index_add_(0, at >> 5, shifted & 0xFFFFFFFF)  # of bits that lie apart, the sum is the union
    words.index_add_(0, (at >> 5) + 1, shifted >> 32)
    rest = ((wide & 0x7F) | ((wide >> 8) & 0x80)).to(torch.uint8)
    return rest, lengths.sum(1, dtype=torch.int16), words.to(torch.int32).view(torch.uint8)[:nbytes]


def exponents_decode(out: Tensor, rest: Tensor, sizes: Tensor, stream: Tensor, table: Tensor) -> Tensor:
    """Write the numbers (int16, n) to `out`. Return, bool (0-dim), whether every block ends where it should.

    `table` (int16, 2^LONGEST) has, for the next bits, the exponent and from bit 8 on its code's length, at least 1. Any
    bytes may be given: nothing is read beyond them.
    """
    blocks, count = sizes.numel(), out.numel()
    if not count:
        return torch.ones((), dtype=torch.bool, device=out.device)
    sizes = sizes.to(torch.int64)
    starts = 8 * starts_of(sizes.clamp(min=0))
    data = torch.nn.functional.pad(stream, (0, 3)).to(torch.int32)
    at, symbols = starts.clone(), torch.empty(CODED, blocks, dtype=torch.int32, device=out.device)
    places = CODED * torch.arange(blocks, device=out.device)
    for i in range(CODED):
        byte = (at >> 3).clamp(max=stream.numel())
        window = (data[byte] | data[byte + 1] << 8 | data[byte + 2] << 16) >> (at & 7)
        entry = table[window & ((1 << LONGEST) - 1)].to(torch.int32)
        symbols[i] = entry & 0xFF
        at += torch.where(places + i < count, entry >> 8, 0)
    exponents = symbols.t().reshape(-1)[:count]
    wide = rest.to(torch.int32)
    out.copy_((wide & 0x7F) | exponents << 7 | (wide & 0x80) << 8)
    return (at == starts + sizes).all() & ((at[-1] + 7) >> 3 <= stream.numel())


def starts_of(sizes: Tensor) -> Tensor:
    """Return at which byte blocks of so many bits begin."""
    nbytes = (sizes + 7) >> 3
    return nbytes.cumsum(0) - nbytes

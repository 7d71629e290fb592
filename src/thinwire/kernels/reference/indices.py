"""Ascending indices in little more than the bits they hold (Elias 1974, Fano 1971)."""

from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.kernels.reference.bits import pack_bits, unpack_bits


class EliasFano(NamedTuple):
    """How `count` indices below `space` are laid out: so many low bits of each packed, and their high parts in unary.

    The lengths are in bytes; each of the two parts is padded to 8.
    """

    low_bits: int
    unary_bits: int
    low_nbytes: int
    nbytes: int

    @classmethod
    def of(cls, count: int, space: int) -> "EliasFano":
        """Return the layout. ⌊log₂(space / count)⌋ low bits are best to a few hundredths of a bit per index."""
        if not count:
            return cls(0, 0, 0, 0)
        low_bits = max(1, space // count).bit_length() - 1
        unary_bits = count + (max(0, space - 1) >> low_bits)
        low_nbytes = -(-count * low_bits // 64) * 8
        return cls(low_bits, unary_bits, low_nbytes, low_nbytes + -(-unary_bits // 64) * 8)


def elias_fano_encode(indices: Tensor, space: int) -> Tensor:
    """Write indices (int32, not descending, each in [0, space)) as uint8 (`EliasFano.nbytes`).

    First the low bits of each, packed; then, padded to 8 bytes each, bits of which those at (index >> low bits) + i
    are set for the i-th index.
    """
    count = indices.numel()
    layout = EliasFano.of(count, space)
    out = torch.zeros(layout.nbytes, dtype=torch.uint8, device=indices.device)
    if layout.low_bits:
        lows = pack_bits(indices, layout.low_bits)
        out[: lows.numel()] = lows
    ones = torch.zeros(layout.unary_bits, dtype=torch.uint8, device=indices.device)
    ones[(indices >> layout.low_bits) + torch.arange(count, device=indices.device)] = 1
    unary = pack_bits(ones, 1)
    out[layout.low_nbytes : layout.low_nbytes + unary.numel()] = unary
    return out


def elias_fano_decode(buffer: Tensor, count: int, space: int) -> Tensor:
    """Return the indices (int32) that `elias_fano_encode` wrote into uint8 `buffer` (`EliasFano.nbytes`).

    All of them are −1 where it cannot have written this: set bits other than `count` in the unary part, an index of
    `space` or more, a smaller one after a larger one, or padding that is not zero. Any bytes may be given.
    """
    layout = EliasFano.of(count, space)
    malformed = torch.full((count,), -1, dtype=torch.int32, device=buffer.device)
    high = unpack_bits(buffer[layout.low_nbytes :], layout.unary_bits, 1).nonzero().view(-1)
    if high.numel() != count:
        return malformed
    high = (high - torch.arange(count, device=buffer.device)) << layout.low_bits
    if layout.low_bits:
        high += unpack_bits(buffer, count, layout.low_bits, torch.int32)
    if bool((high >= space).any()) or bool((high[1:] < high[:-1]).any()):
        return malformed
    indices = high.to(torch.int32)
    return indices if torch.equal(elias_fano_encode(indices, space), buffer) else malformed

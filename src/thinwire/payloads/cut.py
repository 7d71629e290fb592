"""float32 cut to fewer bits: sign, exponent and as much of the mantissa as there is room for."""

import torch
from torch import Tensor

from thinwire import kernels

LEAST_BITS = 12
"""Sign, 8 bits of exponent and 3 of mantissa."""
_QUIET_NAN = 0x7FC00000


def cut(x: Tensor, bits: int) -> Tensor:
    """Return the first `bits` (12 to 32) of each float32, rounded to nearest and even: uint8, packed.

    Beyond the largest number values become infinite; NaN stays NaN.
    """
    patterns = x.to(torch.float32).contiguous().view(torch.int32)
    if bits == 32:
        return patterns.view(torch.uint8)
    rest = 32 - bits
    half = (1 << (rest - 1)) - 1 + ((patterns >> rest) & 1)
    codes = torch.where(x.isnan(), _QUIET_NAN, patterns + half) >> rest
    return kernels.pack_bits(codes, bits)


def widened(data: Tensor, count: int, bits: int) -> Tensor:
    """Return float32 (count) from what `cut` packed into uint8 `data`, which may go on after it."""
    if bits == 32:
        return data[: 4 * count].view(torch.float32)
    codes = kernels.unpack_bits(data, count, bits, torch.int32)
    return (codes << (32 - bits)).view(torch.float32)

"""The grid of the offset float: float32 numbers with few mantissa bits, starting from a smallest one.

The greater of two positive float32 numbers also has the greater bit pattern. To find a number's position on the grid,
drop its pattern's last bits and subtract the smallest number's pattern.
"""

import math
import struct
from typing import Annotated

import torch
from torch import Tensor

from thinwire.checked import Range, checked
from thinwire.formats.base import Bits

MANTISSA = 23
_LEAST, _MOST = 2.0**-126, (2 - 2.0**-23) * 2.0**127  # float32's normal numbers
Mantissa = Annotated[int, Range("0 to 23 bits", least=0, most=MANTISSA)]
Normal = Annotated[float, Range(f"a positive number from {_LEAST:.3g} to {_MOST:.3g}", least=_LEAST, most=_MOST)]
Lowest = Annotated[float, Range(f"a negative number from {-_MOST:.3g} to {-_LEAST:.3g}", least=-_MOST, most=-_LEAST)]


def pattern(value: float) -> int:
    """Return the bits of `value` as a float32."""
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


def number(bits: int) -> float:
    """Return the float32 that has these bits."""
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])


@checked
def balanced_eps(*, bits: Bits, mantissa: Mantissa, max: Normal) -> float:
    """Return the eps with which 2^(bits-1) - 1 numbers lie from eps to `max`, and as many from -eps to -max.

    Raises:
        ValueError: If no such format exists: with so few bits of mantissa eps would lie below float32's normal numbers.
    """
    shift = MANTISSA - mantissa
    base = (pattern(max) >> shift) - 2 ** (bits - 1) + 2
    if base < 1 << mantissa:
        raise ValueError(
            f"no balanced format exists for {bits} bits and mantissa {mantissa}: eps would lie below {_LEAST:.3g}; use "
            "more mantissa or fewer bits"
        )
    return number(base << shift)


def powers(peak: Tensor, top: float, reach: float) -> Tensor:
    """Return powers of two (float32, normal) that bring each peak into (top/2, top]: 1 for zero, NaN for NaN."""
    fraction, exponent = math.frexp(top)
    fractions, exponents = torch.frexp(torch.where(peak > 0, peak, top))
    found = exponents - exponent + (fractions > fraction)
    found = found.clamp(-126, min(127, 128 - math.frexp(reach)[1]))
    return torch.where(peak.isnan(), torch.nan, ((found + 127) << MANTISSA).to(torch.int32).view(torch.float32))

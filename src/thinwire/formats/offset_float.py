"""A float of few bits, with its numbers where gradients are: float32 cut to a grid that starts from a smallest one.

The greater of two positive float32 numbers also has the greater bit pattern. To find a number's position on the grid,
drop its pattern's last bits and subtract the smallest number's pattern.
"""

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Self, final

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.checked import Range, checked
from thinwire.formats.base import Bits, Format, GroupSize, flat32
from thinwire.kernels import OffsetGrid, Rounding
from thinwire.kernels.memory import empty
from thinwire.kernels.parts import Parts

MANTISSA = 23
_LEAST, _MOST = 2.0**-126, (2 - 2.0**-23) * 2.0**127  # float32's normal numbers
Mantissa = Annotated[int, Range("0 to 23 bits", least=0, most=MANTISSA)]
Normal = Annotated[float, Range(f"a positive number from {_LEAST:.3g} to {_MOST:.3g}", least=_LEAST, most=_MOST)]
Lowest = Annotated[float, Range(f"a negative number from {-_MOST:.3g} to {-_LEAST:.3g}", least=-_MOST, most=-_LEAST)]


@final
@checked
@dataclass(frozen=True, kw_only=True)
class OffsetFloat(Format):
    """A float32 cut to a few bits, from `eps` to `max` and from -eps to `min` (Wang et al. 2020, Algorithm 1).

    Code 0 is zero, 1..P are eps..max, P+1.. are -eps..min. Values beyond max and min saturate.

    Args:
        bits: Bits of a code.
        mantissa: How many of them are the mantissa's. eps, max and min are themselves cut to the grid.
        eps: The smallest positive number with a code.
        max: The largest number with a code.
        min: The most negative number with a code, by default -max.
        rounding: Below eps, "truncate" gives zero; "nearest" gives eps from eps/2 on (ties go away from zero);
            "stochastic" gives eps with probability `|x|`/eps.
        scaled: Divides each group by the power of two that brings its largest magnitude into (max/2, max]. So the grid
            follows the gradients. The power is a normal float32 number, and so is the number that max decodes to.
            Magnitudes beyond 2^127 (for max < 1, beyond max · 2^127) may therefore saturate.
        group_size: Values that share a scale; None gives each vector one.

    Raises:
        ValueError: If the numbers do not fit into 2^bits codes.
    """

    bits: Bits = 8
    mantissa: Mantissa = 3
    eps: Normal
    max: Normal = 1.0
    min: Lowest | None = None
    rounding: Rounding = "truncate"
    scaled: bool = True
    group_size: GroupSize = None

    def __post_init__(self) -> None:
        needed = 1 + self.grid.positives + self.grid.negatives
        if self.grid.positives < 1 or self.grid.negatives < 1:
            raise ValueError(f"eps {self.eps} lies beyond max {self.max} or min {-self._lowest}; use a smaller eps")
        if needed > 2**self.bits:
            raise ValueError(
                f"the range from eps {self.eps} to max {self.max} and min {-self._lowest} with mantissa "
                f"{self.mantissa} has {needed} numbers; expected at most 2^{self.bits} = {2**self.bits}: use more "
                "bits, less mantissa or a greater eps"
            )

    @classmethod
    @checked
    def balanced(
        cls,
        *,
        bits: Bits = 8,
        mantissa: Mantissa = 3,
        max: Normal = 1.0,
        rounding: Rounding = "truncate",
        scaled: bool = True,
        group_size: GroupSize = None,
    ) -> Self:
        """Return the format with as many positive as negative numbers.

        Arguments are those of the class. `bits`, `mantissa` and `max` determine its `eps` (see `balanced_eps`);
        `rounding`, `scaled` and `group_size` are passed on.

        Raises:
            ValueError: If no such format exists.
        """
        eps = balanced_eps(bits=bits, mantissa=mantissa, max=max)
        return cls(
            bits=bits, mantissa=mantissa, eps=eps, max=max, rounding=rounding, scaled=scaled, group_size=group_size
        )

    @cached_property
    def grid(self) -> OffsetGrid:
        """The magnitudes that have codes, and how many of them have one with either sign."""
        shift = MANTISSA - self.mantissa
        base, most, least = (pattern(value) >> shift for value in (self.eps, self.max, self._lowest))
        return OffsetGrid(shift, base, most - base + 1, least - base + 1, self.rounding)

    def encode_each(
        self, xs: Parts, *, seeds: Sequence[int], factor: float = 1.0, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return codes and scales. These are powers of two: 1 for a group of zeros, and for all unless `scaled`."""
        x, groups = flat32(xs, factor), self.groups(xs.cut.lengths)
        scales = self._scales(kernels.group_scales(x, groups, math.inf, None, 0.0))
        codes = empty(x.numel(), self.code_dtype, x.device)
        decoded = () if out is None else (self.on(x.device), out)
        kernels.codes_encode(codes, x, scales, groups, self.grid, seeds, *decoded)
        return codes, scales

    def _scales(self, peak: Tensor) -> Tensor:
        if not self.scaled:
            return torch.where(peak.isnan(), torch.nan, torch.ones_like(peak))
        top = number((self.grid.positives + self.grid.base - 1) << self.grid.shift)
        return powers(peak, top, max(self.max, self._lowest))

    def table(self) -> Tensor:
        """Return zero, eps..max, -eps..min, and NaN for the unused codes."""
        positive, negative = (self._numbers(count) for count in self.grid[2:4])
        rest = positive.new_full((2**self.bits - 1 - len(positive) - len(negative),), torch.nan)
        return torch.cat((positive.new_zeros(1), positive, -negative, rest))

    def _numbers(self, count: int) -> Tensor:
        base, shift = self.grid.base, self.grid.shift
        return (torch.arange(base, base + count, dtype=torch.int32, device="cpu") << shift).view(torch.float32)

    @property
    def _lowest(self) -> float:
        return self.max if self.min is None else -self.min


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

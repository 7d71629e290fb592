"""How k of n positions are numbered, and how many bits that takes: the combinatorial number system."""

from math import comb
from typing import NamedTuple, Self

import torch
from torch import Tensor

from thinwire.kernels.memory import kept

DIGIT = 63
"""Bits of a digit: a number of 64 bits with a sign holds it."""
_DIGITS = 2


class Numbering(NamedTuple):
    """How a chunk's positions travel: the lowest `low_bits` of each as they are, the rest as the number of a subset.

    The high parts p >> low_bits may repeat. Plus their rank, 0, 1, …, they are `kept` of `space` numbers. The number of
    a subset has up to two digits of 63 bits.
    """

    low_bits: int
    space: int
    kept: int

    @classmethod
    def of(cls, size: int, kept: int) -> Self | None:
        """Return the numbering of `kept` of `size` positions with the fewest low bits, or None if no digits suffice.

        One digit it is, unless a second saves more than a quarter of a bit for each position.
        """
        short, long = (cls._within(size, kept, digits * DIGIT) for digits in (1, _DIGITS))
        if short is None or long is None:
            return short or long
        return long if 4 * (short._cost - long._cost) > kept else short

    @classmethod
    def _within(cls, size: int, kept: int, most: int) -> Self | None:
        for low_bits in range(size.bit_length()):
            space = ((size - 1) >> low_bits) + kept if low_bits else size
            if comb(space, min(kept, space // 2)) < 1 << most:
                return cls(low_bits, space, kept)
        return None

    @property
    def _cost(self) -> int:
        return self.bits + self.kept * self.low_bits

    @property
    def subsets(self) -> int:
        """How many there are."""
        return comb(self.space, self.kept)

    @property
    def bits(self) -> int:
        """How many bits number one."""
        return (self.subsets - 1).bit_length()

    @property
    def digits(self) -> int:
        """How many digits the binomials have."""
        return 1 if comb(self.space, min(self.kept, self.space // 2)) < 1 << DIGIT else _DIGITS

    def table(self, like: Tensor) -> Tensor:
        """Return C(p, i + 1) for i < `kept` and p < `space`: int64 (digits, kept, space), on the device of `like`.

        The lowest digits come first.
        """
        return _binomials(self.digits, self.space, self.kept, like.device)


def digits_of(number: int, count: int) -> list[int]:
    """Return a number's digits, the lowest first."""
    return [number >> place * DIGIT & ((1 << DIGIT) - 1) for place in range(count)]


@kept
def _binomials(digits: int, space: int, kept: int, device: torch.device) -> Tensor:
    rows = [[digits_of(comb(p, i + 1), digits) for p in range(space)] for i in range(kept)]
    return torch.tensor(rows, dtype=torch.int64, device=device).view(kept, space, digits).permute(2, 0, 1).contiguous()

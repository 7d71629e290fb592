"""How k of n positions are numbered, and how many bits that takes: the combinatorial number system."""

from functools import lru_cache
from math import comb
from typing import NamedTuple, Self

import torch
from torch import Tensor

_LARGEST = 2**63 - 1


class Numbering(NamedTuple):
    """How a chunk's positions travel: the lowest `low_bits` of each as they are, the rest as the number of a subset.

    The high parts p >> low_bits may repeat. Plus their rank, 0, 1, …, they are `kept` of `space` numbers.
    """

    low_bits: int
    space: int
    kept: int

    @classmethod
    def of(cls, size: int, kept: int) -> Self | None:
        """Return the numbering of `kept` of `size` positions with the fewest low bits, or None if 63 are too few."""
        for low_bits in range(size.bit_length()):
            space = ((size - 1) >> low_bits) + kept if low_bits else size
            if comb(space, min(kept, space // 2)) <= _LARGEST:
                return cls(low_bits, space, kept)
        return None

    @property
    def subsets(self) -> int:
        """How many there are."""
        return comb(self.space, self.kept)

    @property
    def bits(self) -> int:
        """How many bits number one."""
        return (self.subsets - 1).bit_length()

    def table(self, like: Tensor) -> Tensor:
        """Return C(p, i + 1) for i < `kept` and p < `space`: int64 (kept, space), on the device of `like`."""
        return _binomials(self.space, self.kept, like.device)


@lru_cache(maxsize=64)
def _binomials(space: int, kept: int, device: torch.device) -> Tensor:
    rows = [[comb(p, i + 1) for p in range(space)] for i in range(kept)]
    return torch.tensor(rows, dtype=torch.int64, device=device).view(kept, space)

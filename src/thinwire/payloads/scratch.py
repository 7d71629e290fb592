"""How much memory an operation takes while it runs: declared by a rule, which a test compares with the allocator."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class Scratch:
    """An upper bound on the bytes that an operation holds at once, beside memories, gradients and staging buffers.

    It is a sum over the bucket's vectors, and holds on a CPU. For a recipe's own settings, float32, and vectors of 2^15
    elements or more, it is at most twice what the allocator measured. Python's own objects add up to a kilobyte a
    vector.

    Args:
        element: Bytes for each element of the vectors.
        longest: For each element of the longest vector, where vectors go one by one.
        value: For each number that this rank sends.
        arriving: For each number that it holds of what ranks sent.
        alone: Maps a vector's length to bytes that are held only while that vector is processed.
    """

    element: float = 0.0
    longest: float = 0.0
    value: float = 0.0
    arriving: float = 0.0
    alone: Callable[[int], float] | None = None

    def nbytes(self, lengths: Sequence[int], values: int, arriving: float = 0.0) -> int:
        """Return the bytes that an operation takes.

        Args:
            lengths: Of the bucket's vectors.
            values: How many numbers this rank sends.
            arriving: How many it holds of what ranks sent.
        """
        elements = self.element * sum(lengths) + self.longest * max(lengths, default=0)
        alone = max(map(self.alone, set(lengths)), default=0) if self.alone else 0
        return round(elements + self.value * values + self.arriving * arriving + alone)


def widening(dtype: torch.dtype, lengths: Sequence[int]) -> int:
    """Return the bytes of the longest vector in float32, if this dtype is narrower: an overflow is written in that."""
    return 4 * max(lengths, default=0) if dtype.itemsize < 4 else 0

"""How much memory an operation takes while it runs: declared by a rule, and held against the allocator by a test."""

from collections.abc import Sequence
from typing import NamedTuple


class Scratch(NamedTuple):
    """An upper bound on the bytes that an operation holds at once, beside memories, gradients and staging buffers.

    It is a sum over the bucket's vectors. element: bytes for each of their elements. longest: for each element of the
    longest vector, where vectors go one by one. value: for each number that this rank sends. arriving: for each number
    that it holds of what ranks sent.

    The rule holds for float32 on a CPU, where it is at most twice what the allocator saw in vectors of 2^15 elements or
    more.
    """

    element: float = 0.0
    longest: float = 0.0
    value: float = 0.0
    arriving: float = 0.0

    def nbytes(self, lengths: Sequence[int], values: int, arriving: float = 0.0) -> int:
        """Return the bytes for vectors of these lengths, so many numbers that are sent, and so many that arrive."""
        elements = self.element * sum(lengths) + self.longest * max(lengths, default=0)
        return round(elements + self.value * values + self.arriving * arriving)

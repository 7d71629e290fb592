"""A measured function of size."""

import math
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self, final


@final
@dataclass(frozen=True)
class Curve:
    """Straight lines through (size, value) points of ascending sizes, never falling; beyond the last, the last slope.

    Below the first point it stays at that point's value: a call costs what it costs. Beyond a single point it is in
    proportion.
    """

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        sizes, values = zip(*self.points, strict=True) if self.points else ((), ())
        if (
            not sizes
            or list(sizes) != sorted(set(sizes))
            or list(values) != sorted(values)
            or not 0 <= values[0] <= values[-1] < math.inf
        ):
            raise ValueError(f"points are {self.points}; expected ascending sizes with values from 0 on, never falling")

    @classmethod
    def through(cls, points: Iterable[tuple[float, float]]) -> Self:
        """Return the curve through measured points; one below its predecessor is lifted to it."""
        risen: list[tuple[float, float]] = []
        for size, value in sorted(points):
            risen.append((float(size), max(float(value), risen[-1][1] if risen else 0.0)))
        return cls(tuple(risen))

    def __call__(self, size: float) -> float:
        """Return the value at `size`."""
        right = bisect_right(self.points, size, key=lambda point: point[0])
        if right == 0:
            return self.points[0][1]
        if len(self.points) == 1:
            return self.points[0][1] * size / max(self.points[0][0], 1.0)
        (x0, y0), (x1, y1) = self.points[min(right, len(self.points) - 1) - 1 :][:2]
        return y0 + (y1 - y0) * (size - x0) / (x1 - x0)

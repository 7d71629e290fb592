"""What outer steps cost in loss, as measured, and how many steps more that makes."""

import math
from itertools import pairwise
from types import MappingProxyType
from typing import NamedTuple

_MEASUREMENT = "300 steps of the byte-level GPT, 4 workers, one to three seeds"


class MeasuredApart(NamedTuple):
    """The final loss of a method of outer steps with `every` inner ones, and of uncompressed training.

    Both trained with AdamW at the settings that are best for uncompressed training, and with the same seeds.
    """

    method: str
    every: int
    loss: float
    dense: float

    @property
    def ratio(self) -> float:
        """How many times the uncompressed loss it ends at."""
        return self.loss / self.dense


OUTER_LOSSES: tuple[MeasuredApart, ...] = (
    MeasuredApart("sparseloco", 10, 1.9253, 1.6569),
    MeasuredApart("diloco", 10, 1.8606, 1.6692),
    MeasuredApart("diloco", 30, 1.8196, 1.6692),
)
"""Of docs/measurements/outer.md, with AdamW inside. Both of `diloco` are means of three seeds."""

_DENSE = MappingProxyType(
    {
        20: 2.4135,
        40: 2.2243,
        60: 2.1189,
        80: 2.0257,
        100: 1.9719,
        120: 1.9172,
        140: 1.8698,
        160: 1.8227,
        180: 1.7982,
        200: 1.7672,
        220: 1.7522,
        240: 1.7355,
        260: 1.7115,
        280: 1.6877,
        300: 1.6684,
    }
)
"""Loss by step of uncompressed training, a mean of three seeds."""


def more_steps(method: str, every: int) -> float | None:
    """Return how many times as many steps as uncompressed training this takes to the same loss, or None if unknown.

    Between two H that were measured, the logarithm of the ratio of losses is interpolated over that of H.
    """
    rows = sorted((row.every, row.ratio) for row in OUTER_LOSSES if row.method == method)
    for found, ratio in rows:
        if found == every:
            return of_ratio(ratio)
    for (low, less), (high, more) in pairwise(rows):
        if low < every < high:
            share = math.log(every / low) / math.log(high / low)
            return of_ratio(math.exp(math.log(less) + share * math.log(more / less)))
    return None


def of_ratio(ratio: float) -> float:
    """Return how many times as many steps it takes to the same loss if as many steps end at `ratio` times that loss.

    Uncompressed training had the higher loss some steps before its end: the rest is what the method is behind. Below a
    ratio of 1 it is 1, as that may be luck; above all that was measured, infinite.
    """
    last = max(_DENSE)
    loss = ratio * _DENSE[last]
    for (early, high), (late, low) in pairwise(_DENSE.items()):
        if low <= loss <= high:
            return last / (early + (late - early) * (high - loss) / (high - low))
    return 1.0 if loss < _DENSE[last] else math.inf


def basis() -> str:
    """Return in a sentence where these figures come from."""
    return (
        f"Steps to the same loss: from {_MEASUREMENT}, which are few outer steps; longer runs and larger models are "
        "said to lose less. Give your own with --more-steps, such as sparseloco:30=1.1."
    )

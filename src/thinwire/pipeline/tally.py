"""What a boundary has let through."""

import math
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


class Choice(NamedTuple):
    """Flat indices (int32, ascending, −1 for padding) of what travels, None for all of it, and the thresholds used."""

    kept: Tensor | None
    thresholds: Tensor


class Report(NamedTuple):
    """Densities wanted, sent (padding included), kept by the threshold, and not zero; and the mean threshold.

    All are shares of the activations' elements, but the threshold. NaN before anything was sent.
    """

    wanted: float
    sent: float
    kept: float
    nonzero: float
    threshold: float


@dataclass
class Tally:
    """Sums on the device, so that counting makes no host wait for it."""

    crossings: int = 0
    elements: int = 0
    sent: int = 0
    kept: Tensor | int = 0
    nonzero: Tensor | int = 0
    thresholds: Tensor | float = 0.0

    def add(self, elements: int, values: Tensor, choice: Choice) -> None:
        """Count one activation of so many elements, of which `values` travel."""
        self.crossings += 1
        self.elements += elements
        self.sent += values.numel()
        self.kept = self.kept + (values.numel() if choice.kept is None else (choice.kept >= 0).sum())
        self.nonzero = self.nonzero + values.count_nonzero()
        self.thresholds = self.thresholds + choice.thresholds.mean()

    def report(self, wanted: float) -> Report:
        """Return the means so far."""
        n, calls = self.elements or math.nan, self.crossings or math.nan
        kept, nonzero = float(self.kept) / n, float(self.nonzero) / n
        return Report(wanted, self.sent / n, kept, nonzero, float(self.thresholds) / calls)

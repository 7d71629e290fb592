"""The figures of one cell of the grid."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from thinwire_lab.studies.planner.worker import AGAIN, DENSE, PLANNED, WATCHED

Event = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One model, number of workers and link. Seconds of a step: predicted, and of every measured step."""

    model: str
    workers: int
    link: str
    predicted: Mapping[str, float]
    measured: Mapping[str, Sequence[float]]
    planning: float
    attaching: float
    deciding: float
    choice: Mapping[str, str]
    reason: str
    same: bool

    def seconds(self, name: str) -> float:
        """Return the median step."""
        return median(self.measured[name])

    def error(self, name: str) -> float:
        """Return the error of a prediction, relative to the measurement."""
        return self.predicted[name] / self.seconds(name) - 1

    @property
    def candidates(self) -> list[str]:
        """The candidates that were used for all tensors."""
        return [name for name in self.measured if name not in (AGAIN, PLANNED, WATCHED)]

    @property
    def best(self) -> str:
        """The fastest candidate, as measured."""
        return min(self.candidates, key=self.seconds)

    def regret(self, name: str) -> float:
        """By what share of the best candidate's step is this slower?"""
        return max(0.0, self.seconds(name) / self.seconds(self.best) - 1)

    def over_dense(self, name: str) -> float:
        """By what share is a row slower than plain DDP? The median over steps taken side by side."""
        pairs = zip(self.measured[name], self.measured[DENSE], strict=True)
        return median(other / dense for other, dense in pairs) - 1


def cell(model: str, workers: int, link: str, events: Sequence[Event]) -> Cell:
    """Make a cell from what rank 0 emitted."""
    one = {event["kind"]: event for event in events}
    history = one["decided"]["history"]
    last: Mapping[str, Any] = history[-1] if history else {"choice": {}, "reason": "undecided"}
    return Cell(
        model=model,
        workers=workers,
        link=link,
        predicted=one["plan"]["predicted"],
        measured={event["name"]: event["seconds"] for event in events if event["kind"] == "times"},
        planning=one["plan"]["seconds"],
        attaching=one["attached"]["seconds"],
        deciding=one["decided"]["seconds"],
        choice=last["choice"],
        reason=last["reason"],
        same=one["same"]["same"],
    )


def summary(cells: Sequence[Cell]) -> dict[str, float]:
    """Return the summary of the grid."""
    errors = [abs(each.error(name)) for each in cells for name in each.predicted]
    regrets = {name: [each.regret(name) for each in cells] for name in (PLANNED, WATCHED)}
    return {
        "predictions": len(errors),
        "median_error": median(errors),
        "error_p90": sorted(errors)[int(0.9 * (len(errors) - 1))],
        "median_regret": median(regrets[PLANNED]),
        "largest_regret": max(regrets[PLANNED]),
        "median_regret_auto": median(regrets[WATCHED]),
        "largest_regret_auto": max(regrets[WATCHED]),
        "auto_over_dense_most": max(each.over_dense(WATCHED) for each in cells),
        "auto_over_dense_median": median(each.over_dense(WATCHED) for each in cells),
        "dense_again_over_dense_most": max(each.over_dense(AGAIN) for each in cells),
        "dense_again_over_dense_least": min(each.over_dense(AGAIN) for each in cells),
    }

"""Workers of unequal speed: when they meet, how much of the mean is whose, and whose part was not finite."""

import logging
import time
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import final

from thinwire.collectives import Group
from thinwire.outer_steps import OuterSteps

_log = logging.getLogger("thinwire")


@final
class Clock:
    """Ticks after each inner step, or after the first at which so much time is over. `steps`: those since then."""

    def __init__(self, every: object) -> None:
        self._seconds = every.total_seconds() if isinstance(every, timedelta) else 0.0
        self.steps = 0
        self._began = time.monotonic()

    def ticks(self) -> bool:
        """Count an inner step, and return whether the clock ticks after it."""
        self.steps += 1
        return time.monotonic() - self._began >= self._seconds

    def restart(self) -> None:
        """Measure from now on."""
        self.steps, self._began = 0, time.monotonic()


@final
class Weights:
    """How much this worker's Δ counts: its samples, by the inner steps that they were taken in where those differ."""

    def __init__(self, group: Group, steps: OuterSteps, samples: int | None) -> None:
        self.group, self._samples = group, samples or 1
        self._timed, self._own = isinstance(steps.every, timedelta), 1.0

    def take(self, steps: int) -> float:
        """Return what the Δ of so many inner steps counts; 0 if it is left out."""
        self._own = float(self._samples * (steps if self._timed else bool(steps)))
        return self._own

    def divide(self, joined: bool, steps: object) -> float:
        """Return by what this worker's Δ is divided, before everybody's weights are known."""
        return self.group.size() / (self._own or 1.0)


@final
class Sick:
    """Workers whose Δ was not finite. `times`: how often, by rank. `skipped`: outer steps that all workers skipped."""

    def __init__(self) -> None:
        self.times, self.skipped = Counter[int](), 0

    def leave_out(self, ranks: Sequence[int], group: Group) -> None:
        """Note that these workers were left out of the mean."""
        self.times.update(ranks)
        if any(map(_worth_saying, map(self.times.get, ranks))):
            _log.log(_level(ranks, group), "%s: left out of the outer step", self._named(ranks))

    def skip(self, ranks: Sequence[int], group: Group) -> None:
        """Note that all workers skipped the outer step."""
        self.times.update(ranks)
        self.skipped += 1
        if _worth_saying(self.skipped):
            named = self._named(ranks) if ranks else "the mean of all workers is not finite, though each one's Δ is"
            _log.log(_level(ranks, group), "%s: nobody took the outer step (%d skipped so far)", named, self.skipped)

    def _named(self, ranks: Sequence[int]) -> str:
        return ", ".join(f"Δ of worker {rank} is not finite (time {self.times[rank]})" for rank in ranks)


def _worth_saying(times: int | None) -> bool:
    return str(times).strip("0") == "1"  # the first time, the tenth, the hundredth


def _level(ranks: Sequence[int], group: Group) -> int:
    return logging.WARNING if group.rank() in (0, *ranks) else logging.DEBUG

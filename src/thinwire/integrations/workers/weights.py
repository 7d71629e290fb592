"""Workers of unequal speed: when they meet, how much of the mean is whose, and whose part was not finite."""

import logging
import time
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import final

import torch
import torch.distributed as dist

from thinwire.collectives import Group
from thinwire.outer_steps import OuterSteps

_log = logging.getLogger("thinwire")


@final
class Clock:
    """Ticks after each inner step, or after the first at which so much time is over. `steps`: those since then."""

    def __init__(self, every: int | timedelta) -> None:
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
    """The share of this worker's Δ in the mean: its samples over all workers'; `waited`: seconds to ask them."""

    def __init__(self, group: Group, steps: OuterSteps, samples: int | None) -> None:
        self.group, self._samples = group, samples or 1
        self._differ = samples is not None or steps.leave_out or isinstance(steps.every, timedelta)
        self._divisor = float(group.size())
        self.waited = 0.0

    def regroup(self, group: Group) -> None:
        """Go on among other workers."""
        self.group, self._divisor = group, float(group.size())

    def take(self, steps: int, device: torch.device) -> list[int]:
        """Weigh the Δ of so many inner steps, 0 if left out; return whose are; a collective if weights differ."""
        if not self._differ:
            return []
        mine = torch.tensor([self._samples * steps], dtype=torch.float64, device=device)
        everyone = mine.new_empty(self.group.size())
        began = time.perf_counter()
        dist.all_gather(list(everyone.split(1)), mine, self.group)
        weights = everyone.tolist()
        self.waited += time.perf_counter() - began
        total, own = sum(weights), weights[self.group.rank()]
        self._divisor = total / own if own else max(1.0, total)
        return [rank for rank, weight in enumerate(weights) if not weight]

    def divide(self, joined: bool, steps: object) -> float:
        """Return by what this worker's Δ is divided."""
        return self._divisor


@final
class Sick:
    """Workers whose Δ was not finite. `times`: how often, by rank. `skipped`: outer steps that all workers skipped."""

    def __init__(self) -> None:
        self.times, self.skipped = Counter[int](), 0

    def leave_out(self, ranks: Sequence[int], group: Group) -> None:
        """Note that these workers were left out of the mean."""
        self.times.update(ranks)
        if any(map(_worth_saying, map(self.times.get, ranks))):
            _log.log(_level(ranks, group), "%s: the others took the outer step without", self._named(ranks))

    def skip(self, ranks: Sequence[int], group: Group) -> None:
        """Note that all workers skipped the outer step."""
        self.times.update(ranks)
        self.skipped += 1
        if _worth_saying(self.skipped):
            named = self._named(ranks) if ranks else "the mean of all workers is not finite, though each one's Δ is"
            _log.log(_level(ranks, group), "%s: nobody took the outer step, %d so far", named, self.skipped)

    def _named(self, ranks: Sequence[int]) -> str:
        return ", ".join(f"Δ of worker {rank} is not finite (time {self.times[rank]})" for rank in ranks)


def _worth_saying(times: int | None) -> bool:
    return str(times).strip("0") == "1"  # the first time, the tenth, the hundredth


def _level(ranks: Sequence[int], group: Group) -> int:
    return logging.WARNING if group.rank() in (0, *ranks) else logging.DEBUG

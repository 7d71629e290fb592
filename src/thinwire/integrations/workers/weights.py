"""Workers of unequal speed: when they meet, and how much of the mean is whose."""

import time
from datetime import timedelta
from typing import final

import torch
import torch.distributed as dist

from thinwire.collectives import Group
from thinwire.outer_steps import OuterSteps


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
    """The share of this worker's Δ in the mean over `group`: the samples it stands for, over those of all workers.

    Where all workers have the same, nothing is asked of the others. `waited`: seconds that asking them took so far.
    """

    def __init__(self, group: Group, steps: OuterSteps, samples: int | None) -> None:
        self.group, self._samples = group, samples or 1
        self._differ = samples is not None or steps.leave_out or isinstance(steps.every, timedelta)
        self._divisor = float(group.size())
        self.waited = 0.0

    def regroup(self, group: Group) -> None:
        """Go on among other workers."""
        self.group, self._divisor = group, float(group.size())

    def take(self, steps: int, device: torch.device) -> bool:
        """Weigh the Δ of so many inner steps; none, if this worker is left out. Return whether any worker's counts.

        A collective, where weights differ.
        """
        if not self._differ:
            return True
        mine = float(self._samples * steps)
        total = torch.tensor(mine, dtype=torch.float64, device=device)
        began = time.perf_counter()
        dist.all_reduce(total, group=self.group)
        self.waited += time.perf_counter() - began
        self._divisor = float(total) / mine if mine else max(1.0, float(total))
        return bool(total)

    def divide(self, joined: bool, steps: object) -> float:
        """Return by what this worker's Δ is divided."""
        return self._divisor

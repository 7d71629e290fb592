"""Numbers that change with the step, such as a density that warms up."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

from thinwire.checked import Amount, Fraction, Number, Range, Share, Size, checked

Steps = Annotated[int, Range("at least 1 step", least=1)]

__all__ = [
    "Density",
    "Every",
    "FollowLearningRate",
    "Schedule",
    "Stages",
    "exponential_warmup",
    "gtopk_warmup",
    "recovery",
    "resolve",
]


class Schedule(ABC):
    """A number as a function of the step, counted from 0."""

    @abstractmethod
    def __call__(self, step: int) -> float:
        """Return the value at `step`."""


Density = Share | Schedule
"""A density, or a schedule of it."""


@checked
@dataclass(frozen=True, kw_only=True)
class Stages(Schedule):
    """Give each of `values` for `steps_each` steps, then `final`.

    Args:
        values: One after another.
        steps_each: Steps for which each value holds.
        final: The value after them.
    """

    values: Sequence[Number]
    steps_each: Steps
    final: Number

    def __call__(self, step: int) -> float:
        """Return the value at `step`."""
        stage = step // self.steps_each
        return self.values[stage] if stage < len(self.values) else self.final


@checked
def exponential_warmup(final: Share, *, steps_each: Steps, stages: Size = 4) -> Stages:
    """Return 1/4, 1/16, … and then `final`: the warm-up of Deep Gradient Compression (Lin et al. 2018, §3.3).

    Args:
        final: The density after the warm-up.
        steps_each: Steps of each stage before `final`.
        stages: How many stages come before `final`. None of them goes below it.
    """
    values = tuple(max(final, 0.25 ** (stage + 1)) for stage in range(stages))
    return Stages(values=values, steps_each=steps_each, final=final)


@checked
def resolve(value: Number | Schedule, step: Size) -> float:
    """Return `value` at `step`; a plain number is the same at every step.

    Raises:
        ValueError: If a schedule gives no finite number.
    """
    if not isinstance(value, Schedule):
        return value
    if not math.isfinite(found := value(step)):
        raise ValueError(f"{value} gives {found} at step {step}; expected a finite number")
    return found


@checked
@dataclass(frozen=True, kw_only=True)
class Every(Schedule):
    """Give 1 at the first step and at every n-th step from there, 0 at the others."""

    steps: Steps

    def __call__(self, step: int) -> float:
        """Return 1 or 0."""
        return float(step % self.steps == 0)


@checked
@dataclass(frozen=True, kw_only=True)
class FollowLearningRate(Schedule):
    """Give a density 1 − θ that follows the learning rate: θ² = smoothness · η(step) (Wang et al. 2020, Theorem 3.5).

    Args:
        learning_rate: Maps the step to η.
        smoothness: The L of an L-smooth loss.
        largest_drop: The largest θ, the share to drop.
    """

    learning_rate: Callable[[int], float]
    smoothness: Amount
    largest_drop: Fraction = 0.85

    def __call__(self, step: int) -> float:
        """Return the density at `step`."""
        return 1 - min(math.sqrt(self.smoothness * self.learning_rate(step)), self.largest_drop)  # NaN stays


@checked
def recovery(density: Share, *, at_step: Steps) -> Stages:
    """Return `density` before `at_step` and 1 from then on, so that accuracy recovers (Wang et al. 2020)."""
    return Stages(values=(density,), steps_each=at_step, final=1.0)


@checked
def gtopk_warmup(final: Share = 0.001, *, steps_per_epoch: Steps) -> Stages:
    """Return gTop-k's warm-up: a density for each of the first four epochs, then `final`.

    Args:
        final: The density after the warm-up; the paper's LSTM takes 0.005.
        steps_per_epoch: Steps in an epoch.
    """
    return Stages(values=(0.25, 0.0725, 0.015, 0.004), steps_each=steps_per_epoch, final=final)

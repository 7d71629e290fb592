"""Numbers that change with the step, such as a density that warms up."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass


class Schedule(ABC):
    """A number as a function of the step, counted from 0."""

    @abstractmethod
    def __call__(self, step: int) -> float:
        """Return the value at `step`."""


@dataclass(frozen=True, kw_only=True)
class Stages(Schedule):
    """Give each of `values` for `steps_each` steps, then `final` from there on.

    Raises ValueError if `steps_each` is below 1.
    """

    values: Sequence[float]
    steps_each: int
    final: float

    def __post_init__(self) -> None:
        if self.steps_each < 1:
            raise ValueError(f"steps_each is {self.steps_each}; a stage lasts at least 1 step")

    def __call__(self, step: int) -> float:
        """Return the value at `step`."""
        stage = step // self.steps_each
        return self.values[stage] if stage < len(self.values) else self.final


def exponential_warmup(final: float, *, steps_each: int, stages: int = 4) -> Stages:
    """Return 1/4, 1/16, … and then `final`: the warm-up of Deep Gradient Compression (Lin et al. 2018, §3.3)."""
    values = tuple(max(final, 0.25 ** (stage + 1)) for stage in range(stages))
    return Stages(values=values, steps_each=steps_each, final=final)


def resolve(value: float | Schedule, step: int) -> float:
    """Return `value` at `step`; a plain number is the same at every step."""
    return value(step) if isinstance(value, Schedule) else value


@dataclass(frozen=True, kw_only=True)
class Every(Schedule):
    """1 at the first step and at every `steps`-th step after it, 0 at the others.

    Raises ValueError if `steps` is below 1.
    """

    steps: int

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps is {self.steps}; expected 1 or more")

    def __call__(self, step: int) -> float:
        """Return 1 or 0."""
        return float(step % self.steps == 0)


@dataclass(frozen=True, kw_only=True)
class FollowLearningRate(Schedule):
    """A density 1 − θ that follows the learning rate: θ² = smoothness · η(step) (Wang et al. 2020, Theorem 3.5).

    θ is the share that is dropped; it falls with the learning rate, and is at most `largest_drop`. `learning_rate` maps
    the step to η. `smoothness` is the L of an L-smooth loss. Raises ValueError unless `largest_drop` is in [0, 1) and
    `smoothness` is 0 or more.
    """

    learning_rate: Callable[[int], float]
    smoothness: float
    largest_drop: float = 0.85

    def __post_init__(self) -> None:
        if not 0 <= self.largest_drop < 1 or self.smoothness < 0:
            raise ValueError(
                f"largest_drop is {self.largest_drop} and smoothness {self.smoothness}; expected a share below 1 "
                "and 0 or more"
            )

    def __call__(self, step: int) -> float:
        """Return the density at `step`."""
        return 1 - min(self.largest_drop, math.sqrt(self.smoothness * self.learning_rate(step)))


def recovery(density: float, *, at_step: int) -> Stages:
    """Return `density` before `at_step` and 1 from then on, so that accuracy recovers (Wang et al. 2020)."""
    return Stages(values=(density,), steps_each=at_step, final=1.0)


def gtopk_warmup(final: float = 0.001, *, steps_per_epoch: int) -> Stages:
    """Return gTop-k's warm-up: a density for each of the first four epochs, then `final` (0.005 for its LSTM)."""
    return Stages(values=(0.25, 0.0725, 0.015, 0.004), steps_each=steps_per_epoch, final=final)

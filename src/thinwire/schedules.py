"""Numbers that change with the step, such as a density that is warmed up."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass


class Schedule(ABC):
    """A number as a function of the step, counted from 0."""

    @abstractmethod
    def __call__(self, step: int) -> float:
        """Return the value at `step`."""


@dataclass(frozen=True, kw_only=True)
class Stages(Schedule):
    """Hold each of `values` for `steps_each` steps, then `final` for ever.

    Raises ValueError when `steps_each` is below 1.
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
    """Return densities 1/4, 1/16, … and then `final`, as Deep Gradient Compression warms up (Lin et al. 2018, §3.3)."""
    values = tuple(max(final, 0.25 ** (stage + 1)) for stage in range(stages))
    return Stages(values=values, steps_each=steps_each, final=final)


def resolve(value: float | Schedule, step: int) -> float:
    """Return `value` at `step`; a plain number is the same at every step."""
    return value(step) if isinstance(value, Schedule) else value

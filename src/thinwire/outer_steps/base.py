"""What outer steps are made of: when workers meet, what travels, and what the mean is used for."""

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Annotated, Any, final

import torch

from thinwire.checked import BODY, Count, Fraction, Size, checked
from thinwire.recipes.dense import dense
from thinwire.reducer import Reducer
from thinwire.reducer.base import words
from thinwire.schedules import Schedule

MakeOptimizer = Callable[..., torch.optim.Optimizer]
"""Makes an optimizer of a list of parameters, as torch.optim's classes do."""

NESTEROV: MakeOptimizer = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)


@final
@checked
@dataclass(frozen=True, kw_only=True)
class OuterSteps:
    """How workers that train independently stay together: pass it to `thinwire.outer`.

    Args:
        every: H, the inner steps from one outer step to the next. Or a time, where workers differ in speed: each then
            takes as many inner steps as it can, and its Δ is weighted by their number.
        recipe: Reduces the workers' Δ = global − own parameters to their mean.
        make_optimizer: Makes the outer optimizer, which takes that mean as the gradient of the global parameters. By
            default it is SGD with Nesterov's momentum of 0.9 and a learning rate of 0.7, as in DiLoCo.
        rate: The outer optimizer's learning rate, or a schedule of it by outer step. None keeps the one it was made
            with.
        fragments: The number of parts, of about equal size and in the model's order; or the parts themselves, each a
            tuple of module or parameter names. Fragments take their outer steps one after another, spread over the H
            inner steps.
        delay: τ, the inner steps that go on while the exchange of a fragment is under way. With 0, workers wait for it.
        mixing: α, the share of its own parameters that a worker then keeps: own ← α · own + (1 − α) · global.
        leave_out: Whether a worker whose Δ is not finite is left out of the mean. Otherwise all workers skip that outer
            step.

    Raises:
        ValueError: If delay is not below `every`; if `every` is a time of 0, or a time together with fragments or a
            delay.
        TypeError: For anything but a recipe.
    """

    every: Count | timedelta
    recipe: Annotated[Reducer, BODY] = field(default_factory=dense)
    make_optimizer: MakeOptimizer = NESTEROV
    rate: Schedule | None = None
    fragments: Count | tuple[tuple[str, ...], ...] = 1
    delay: Size = 0
    mixing: Fraction = 0.0
    leave_out: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.recipe, Reducer):
            raise TypeError(f"recipe is {self.recipe!r:.100}; expected one such as recipes.topk(density=0.01)")
        if isinstance(self.every, timedelta):
            self._check_time(self.every)
        elif self.delay >= self.every:
            raise ValueError(
                f"delay is {self.delay} and every is {self.every}; expected a delay below it, or a fragment would be "
                "sent again before it has arrived"
            )

    def _check_time(self, every: timedelta) -> None:
        if every <= timedelta(0):
            raise ValueError(f"every is {every!r}; expected a positive time, such as timedelta(minutes=2)")
        if self.parts > 1 or self.delay:
            raise ValueError(
                f"every is a time, with {self.parts} fragments and a delay of {self.delay}; expected one fragment and "
                "no delay, as workers take different numbers of inner steps: give `every` as a number of steps"
            )

    @property
    def parts(self) -> int:
        """How many fragments there are."""
        return self.fragments if isinstance(self.fragments, int) else len(self.fragments)

    @property
    def period(self) -> int:
        """Ticks from one outer step to the next. A tick is an inner step or, if `every` is a time, that time."""
        return 1 if isinstance(self.every, timedelta) else self.every

    def due(self, part: int, tick: int) -> bool:
        """Return whether the exchange of fragment `part` (from 0) starts at this tick (from 1)."""
        return tick >= self._first(part) and (tick - self._first(part)) % self.period == 0

    def parts_due(self, tick: int) -> list[int]:
        """Return the fragments whose exchange starts at this tick."""
        return [part for part in range(self.parts) if self.due(part, tick)]

    def following(self, tick: int) -> int:
        """Return the next tick at which an exchange starts."""
        firsts = [self._first(part) for part in range(self.parts)]
        return min(first + max(0, (tick - first) // self.period + 1) * self.period for first in firsts)

    def done(self, part: int, tick: int) -> int:
        """Return how many exchanges of fragment `part` have started by this tick."""
        return max(0, (tick - self._first(part)) // self.period + 1)

    def _first(self, part: int) -> int:
        """Return at which tick the first exchange starts: after H inner steps for the last fragment."""
        return -(-self.period * (part + 1) // self.parts)

    def settings(self) -> dict[str, Any]:
        """Return all but recipe and optimizer, as plain values. Workers must agree on them."""
        return {name: getattr(self, name) for name in ("every", "fragments", "delay", "mixing", "leave_out")} | {
            "rate": words(self.rate)
        }

"""Outer steps: workers train on their own, and exchange now and then how far they have moved.

`OuterSteps` says when they meet, what travels and what the mean is used for; a function for each paper makes one.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, final

import torch
from torch import Tensor

from thinwire.checked import BODY, Amount, Count, Fraction, Part, Size, checked
from thinwire.codecs import Cast, ChunkTopK
from thinwire.formats import Format, Magnitudes, OffsetFloat
from thinwire.memories import ErrorFeedback, Memory, NoMemory
from thinwire.payloads import Narrow
from thinwire.recipes.dense import dense
from thinwire.reducer import Compressed, MinimumSize, Reducer
from thinwire.reducer.base import words
from thinwire.schedules import Density, Schedule, resolve

__all__ = ["MakeOptimizer", "OuterSteps", "diloco", "muloco", "sparseloco", "streaming_diloco"]

MakeOptimizer = Callable[..., torch.optim.Optimizer]
"""Makes an optimizer of a list of parameters, as torch.optim's classes do."""


def made_optimizer(make: MakeOptimizer, parameters: Sequence[Tensor]) -> torch.optim.Optimizer:
    """Return what it makes; TypeError for no optimizer, ValueError unless that holds these and nothing else trained."""
    made: object = make(parameters)
    if not isinstance(made, torch.optim.Optimizer):
        raise TypeError(
            f"make_optimizer made a {type(made).__name__}; expected one of torch.optim's, as in "
            "make_optimizer=lambda parameters: SGD(parameters, lr=0.7)"
        )
    held = {id(p) for each in made.param_groups for p in each["params"] if p.requires_grad}
    if held != {id(p) for p in parameters}:
        raise ValueError(
            f"the optimizer {type(made).__name__} holds {len(held)} parameters; expected the {len(parameters)} that it "
            "is given: build it from its argument, as in make_optimizer=lambda parameters: SGD(parameters, lr=0.7)"
        )
    return made


def check_settings(
    settings: Sequence[Mapping[str, Any]], optimizer: torch.optim.Optimizer, error: type[Exception] = ValueError
) -> None:
    """Raise unless these are the groups' settings of such an optimizer; schedules and other torches add some."""
    here = optimizer.defaults.keys()
    alike = all(here <= group.keys() or group.keys() <= here | {"params"} for group in settings)
    if not alike or len(settings) != len(optimizer.param_groups):
        raise error(
            f"the state belongs to another optimizer than this {type(optimizer).__name__}: its settings are "
            f"{[sorted(group) for group in settings]}, here {len(optimizer.param_groups)} times {sorted(here)}: use "
            "the optimizer it was saved with"
        )


NESTEROV: MakeOptimizer = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)


@final
@checked
@dataclass(frozen=True, kw_only=True)
class OuterSteps:
    """How workers that train independently stay together: pass it to `thinwire.outer`.

    Args:
        every: H, the inner steps from one outer step to the next, or a schedule of H by outer step, from 0.
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
        ValueError: If delay is not below `every`, or if `every` is a schedule and there is a delay.
        TypeError: For anything but a recipe.
    """

    every: Count | Schedule
    recipe: Annotated[Reducer, BODY] = field(default_factory=dense)
    make_optimizer: MakeOptimizer = NESTEROV
    rate: Schedule | None = None
    fragments: Count | tuple[tuple[str, ...], ...] = 1
    delay: Size = 0
    mixing: Fraction = 0.0
    leave_out: bool = True
    _ends: list[tuple[int, ...]] = field(default_factory=lambda: [(0,)], init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.recipe, Reducer):
            raise TypeError(f"recipe is {self.recipe!r:.100}; expected one such as recipes.topk(density=0.01)")
        if isinstance(self.every, Schedule):
            if self.delay:
                raise ValueError(
                    f"delay is {self.delay} and every is a schedule; expected no delay, or a number of steps"
                )
        elif self.delay >= self.every:
            raise ValueError(
                f"delay is {self.delay} and every is {self.every}; expected a delay below it, or a fragment would be "
                "sent again before it has arrived"
            )

    @property
    def parts(self) -> int:
        """How many fragments there are."""
        return self.fragments if isinstance(self.fragments, int) else len(self.fragments)

    def parts_due(self, tick: int) -> list[int]:
        """Return the fragments, from 0, whose exchange starts at this tick (an inner step, from 1)."""
        return [part for part in range(self.parts) if tick == self._due(part, tick)]

    def following(self, tick: int) -> int:
        """Return the next tick at which an exchange starts."""
        ticks = [self._due(part, tick + 1) for part in range(self.parts)]
        return min(each for each in ticks if each > tick)  # the last fragment's, if no other

    def latest(self, tick: int) -> int:
        """Return the latest tick up to this one at which an exchange started, 0 if there is none."""
        dues = [self._due(part, tick) for part in range(self.parts)]
        return max([self._round(tick)[1], *(due for due in dues if due <= tick)])

    def done(self, part: int, tick: int) -> int:
        """Return how many exchanges of fragment `part` have started by this tick."""
        return self._round(tick)[0] + (tick >= self._due(part, tick))

    def _due(self, part: int, tick: int) -> int:
        """Return when a fragment is due in the round that has this tick: at its end, if it is the last."""
        _, begin, length = self._round(tick)
        return begin - (-length * (part + 1) // self.parts)

    def _round(self, tick: int) -> tuple[int, int, int]:
        """Return which round of H inner steps a tick is in, from 0, the tick before that, and H."""
        if not isinstance(self.every, Schedule):
            index = max(0, tick - 1) // self.every
            return index, index * self.every, self.every
        ends = self._ends[0]
        while ends[-1] < max(1, tick):
            length = round(resolve(self.every, len(ends) - 1))
            if length < 1:
                raise ValueError(f"every gives {length} inner steps at outer step {len(ends) - 1}; expected at least 1")
            ends = (*ends, ends[-1] + length)
        self._ends[0] = ends  # replaced as a whole: another thread may look
        index = max(1, bisect_left(ends, tick)) - 1
        return index, ends[index], ends[index + 1] - ends[index]

    def settings(self) -> dict[str, Any]:
        """Return all but recipe and optimizer, as plain values. Workers must agree on them."""
        every = words(self.every) if isinstance(self.every, Schedule) else self.every
        plain = {name: getattr(self, name) for name in ("fragments", "delay", "mixing", "leave_out")}
        return {"every": every} | plain | {"rate": words(self.rate)}


@checked
def diloco(*, every: Count = 500) -> OuterSteps:
    """Exchange every parameter's Δ, uncompressed; outer Nesterov SGD of rate 0.7 and momentum 0.9 (DiLoCo).

    Douillard et al. 2023, arXiv 2311.08105. H = 500 is read off the abstract's 500 times less communication, and was
    not checked against the paper's tables.

    Args:
        every: Inner steps from one outer step to the next.
    """
    return OuterSteps(every=every)


_E3M0 = OffsetFloat.balanced(bits=4, mantissa=0, rounding="nearest", group_size=256)


@checked
def streaming_diloco(
    *,
    every: Count = 100,
    fragments: Count | tuple[tuple[str, ...], ...] = 4,
    delay: Size = 5,
    mixing: Fraction = 0.5,
    memory: Memory | None = None,
) -> OuterSteps:
    """Exchange a fragment's Δ in floats of 4 bits, and merge what arrives some steps later (Streaming DiLoCo).

    Douillard et al. 2025, arXiv 2501.18512. The outer optimizer is SGD with Nesterov's momentum of 0.9 and a learning
    rate of 0.4. 256 values share a scale. H = 100, the rate of 0.4, the delay of 5 and α = 0.5 are from memory: nothing
    here confirms them, so look them up before you compare with the paper.

    Args:
        every: See `OuterSteps`.
        fragments: See `OuterSteps`. The paper's fragments have 3 layers each, spaced evenly through the model; to get
            those, name them.
        delay: See `OuterSteps`.
        mixing: See `OuterSteps`.
        memory: Keeps what 4 bits lose, such as `memories.ErrorFeedback()`. The paper keeps nothing.
    """
    return OuterSteps(
        every=every,
        recipe=Compressed(memory=memory or NoMemory(), codec=Cast(values=_E3M0)),
        make_optimizer=partial(torch.optim.SGD, lr=0.4, momentum=0.9, nesterov=True),
        fragments=fragments,
        delay=delay,
        mixing=mixing,
    )


_ALL, _LARGEST = Magnitudes(levels=(0.57, 1.89), group_size=512), Magnitudes()


@checked
def muloco(
    *,
    every: Count | Schedule = 30,
    rate: Amount | Schedule = 0.7,
    momentum: Fraction = 0.6,
    values: Format = _ALL,
    minimum_size: Size = 1024,
    residual_dtype: torch.dtype | None = None,
) -> OuterSteps:
    """Send every element in 2 bits: e ← e + Δ; q = Q(e); e ← e − q (MuLoCo). Let Muon take the inner steps.

    Thérien et al. 2025, arXiv 2505.23725. The outer optimizer is SGD with Nesterov's momentum. H, its rate and its
    momentum are the defaults of the authors' code. The paper quantises otherwise; these levels are those of least error
    for a normal distribution.

    Args:
        every: Inner steps from one outer step to the next, or a schedule of them by outer step.
        rate: The outer learning rate, or a schedule of it by outer step.
        momentum: The outer momentum.
        values: How values travel.
        minimum_size: Tensors with fewer elements are sent uncompressed.
        residual_dtype: torch.bfloat16 takes 4 bytes a parameter less; see `memories.ErrorFeedback`.
    """
    large = Compressed(memory=ErrorFeedback(dtype=residual_dtype), codec=Cast(values=values))
    return OuterSteps(
        every=every,
        recipe=MinimumSize(minimum_size=minimum_size, large=large),
        make_optimizer=partial(torch.optim.SGD, lr=resolve(rate, 0), momentum=momentum, nesterov=momentum > 0),
        rate=rate if isinstance(rate, Schedule) else None,
    )


@checked
def sparseloco(
    *,
    every: Count | Schedule = 30,
    density: Density = 64 / 4096,
    decay: Part = 0.95,
    rate: Amount | Schedule = 1.0,
    values: Narrow = _LARGEST,
    minimum_size: Size = 1024,
    residual_dtype: torch.dtype | None = None,
) -> OuterSteps:
    """Send 64 of each 64 × 64 elements, in 2 bits: e ← decay · e + Δ; q = Q(Top-k(e)); e ← e − q (SparseLoCo).

    Sarfi et al. 2025, arXiv 2508.15706. These are the settings of one production run. The outer optimizer is SGD
    without momentum: global ← global − rate · mean of q.

    Args:
        every: Inner steps from one outer step to the next, or a schedule of them by outer step; the abstract has 15 to
            250.
        density: The share of elements to send, or a schedule of it by outer step; the abstract gives 1 to 3 %.
        decay: Decay of the residual.
        rate: The outer learning rate, or a schedule of it by outer step. In that run it fell from 1.0 to 0.4 in steps,
            as `schedules.Stages(values=(1.0, 0.8, 0.6), steps_each=2000, final=0.4)` does.
        values: How values travel.
        minimum_size: Tensors with fewer elements are sent uncompressed.
        residual_dtype: torch.bfloat16 takes 4 bytes a parameter less; see `memories.ErrorFeedback`.
    """
    codec = ChunkTopK(density=density, chunk=64, transform=None, values=values)
    large = Compressed(memory=ErrorFeedback(decay=decay, dtype=residual_dtype), codec=codec)
    return OuterSteps(
        every=every,
        recipe=MinimumSize(minimum_size=minimum_size, large=large),
        make_optimizer=partial(torch.optim.SGD, lr=resolve(rate, 0)),
        rate=rate if isinstance(rate, Schedule) else None,
    )

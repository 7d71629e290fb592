"""What kind of optimizer is this, does a recipe suit it, and where does it have momentum?

What is said once: error feedback stands in front of one that rescales updates, or orthogonalised updates in front of
one that needs the gradient's length or orthogonalises itself.
"""

import logging
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any, final

import torch
from torch import Tensor, nn

from thinwire.errors import MomentumError
from thinwire.integrations.momentum.handover import Settings, buffer_of, first_moment_of, has_momentum
from thinwire.integrations.training.gradients import local, shaped_like
from thinwire.integrations.training.optimizers import step_of
from thinwire.memories import ErrorFeedback, Memory
from thinwire.planner.candidates import INSTEAD, OptimizerName, measured

# What only these have in their groups. Whoever has eps divides by a root; Muon has one too, and comes first.
_TELLING: dict[str, OptimizerName] = {"ns_steps": "muon", "dampening": "sgd", "eps": "adamw"}
_STRICTEST_FIRST: tuple[OptimizerName, ...] = ("muon", "adamw", "sgd")


def family(optimizers: Sequence[torch.optim.Optimizer]) -> OptimizerName | None:
    """Return what optimizers that together train a model count as: muon or adamw as soon as one is; None if unknown."""
    settings = [each.param_groups[0] if each.param_groups else {} for each in optimizers]
    found = [next((name for key, name in _TELLING.items() if key in first), None) for first in settings]
    return None if None in found else next((name for name in _STRICTEST_FIRST if name in found), None)


@dataclass(frozen=True, kw_only=True)
class FirstMoment:
    """Where an optimizer has momentum: decay β is `setting`, and Σ βᵏ·g (times 1 − β if `averaged`) the `buffer`."""

    setting: str
    buffer: str
    averaged: bool
    alone: bool

    def without(self, group: Settings) -> dict[str, Any]:
        """Return the group's setting with β = 0."""
        value = group[self.setting]
        return {self.setting: (value[0] * 0, *value[1:]) if self.setting == "betas" else 0.0}

    def unit(self, group: Settings) -> float:
        """Return what one gradient adds to the buffer: 1 or 1 − β, negative where the optimizer maximizes."""
        sign = -1.0 if group.get("maximize") else 1.0
        return sign * (1 - first_moment_of(group)) if self.averaged else sign


_ADAM = FirstMoment(setting="betas", buffer="exp_avg", averaged=True, alone=False)
_KINDS = {
    torch.optim.Adam: _ADAM,
    torch.optim.AdamW: _ADAM,
    torch.optim.RAdam: _ADAM,
    torch.optim.Adamax: _ADAM,
    torch.optim.Muon: FirstMoment(setting="momentum", buffer="momentum_buffer", averaged=True, alone=True),
    torch.optim.SGD: FirstMoment(setting="momentum", buffer="momentum_buffer", averaged=False, alone=True),
}
"""The optimizers whose first moment is linear in the gradients, so that it can be applied to them beforehand.

RMSprop's momentum is of what it has divided by the second moment. NAdam keeps a product of its momenta, which zeros
would end. Without momentum they work, as do optimizers that have none, such as Adafactor. A class that derives from one
of these has its step if it calls `super().step()`. Otherwise it may do anything, and counts as one from elsewhere.
"""
_STEPS = {step_of(kind): where for kind, where in _KINDS.items()}


kind_of: Callable[[type[torch.optim.Optimizer]], FirstMoment | None] = cache(lambda kind: _STEPS.get(step_of(kind)))  # type: ignore[assignment]
"""Returns where these optimizers have their first moment; None if they have none, or if that is not linear."""


def movable(optimizers: Iterable[torch.optim.Optimizer], parameters: Collection[nn.Parameter]) -> bool:
    """Whether all of these have momentum in these optimizers that can be moved into a memory."""
    groups = [group for each in optimizers if kind_of(type(each)) for group in each.param_groups]
    held = {p for group in groups if first_moment_of(group) and not group.get("dampening") for p in group["params"]}
    return held.issuperset(parameters)


@torch.no_grad()
def filled(
    optimizer: torch.optim.Optimizer, group: Settings, p: nn.Parameter, momentum: Tensor | None, *, moved: bool
) -> bool:
    """Put momentum back into the buffer of `p`; `moved`: the optimizer has put there what was delivered last."""
    kind, state = kind_of(type(optimizer)), optimizer.state.get(p, {})
    if kind is None or not first_moment_of(group) or not (kind.alone or kind.buffer in state):
        return False
    buffer = buffer_of(optimizer, p, kind.buffer)
    if moved:
        buffer.zero_()
    if momentum is not None:
        local(buffer).add_(shaped_like(p, momentum), alpha=kind.unit(group))
    return True


def check_movable(optimizer: torch.optim.Optimizer, group: Settings, own: str) -> None:
    """Raise MomentumError for momentum that no memory can apply in its place. `own`: what memories call decay."""
    if group.get("dampening"):
        raise MomentumError("SGD's dampening cannot be moved into the memory; set dampening=0")
    if kind_of(type(optimizer)) is None and has_momentum(optimizer, group):
        base = next((kind.__name__ for kind in type(optimizer).__mro__ if kind in _KINDS), None)
        why = f", as its step does not call {base}'s by super().step()" if base else ""
        raise MomentumError(
            f"{type(optimizer).__name__} has momentum that cannot be moved into the memory{why}. Either set it to 0 "
            f"(momentum, or every beta but the second) and give the recipe's memory a {own}; or use AdamW, Adam, "
            "RAdam, Adamax, Muon, SGD or a subclass whose step calls theirs"
        )


_log = logging.getLogger("thinwire")
_SAID_OF = "topk:0.01"
_UNMEASURED = (
    "{name} may rescale updates or take their sign; with error feedback, elements that are sent rarely may then "
    "hardly move. It has not been measured: compare with uncompressed training, or use a recipe without error "
    "feedback: docs/how-to/choose-a-recipe.md"
)
_WHY: Mapping[OptimizerName | None, str] = MappingProxyType(
    {
        "sgd": "scales its step by the gradient, but orthogonalised updates no longer have the gradients' size",
        "muon": "orthogonalises again, which amplifies directions that were hardly sent",
    }
)
_SQUARES = "exp_avg_sq", "exp_inf", "square_avg", "sum", "row_var", "variance"
"""What optimizers call the second moment that they divide by the root of."""


class ErrorFeedbackAdvice:
    """Warns once, on rank 0, when error feedback meets an optimizer that moves what is sent rarely too little.

    `feedback`: the memories that it is about; none once it has warned. `met`: optimizers that have stepped since there
    was a residual.
    """

    def __init__(self, memories: Sequence[Memory], rank: int) -> None:
        self.feedback = [part for m in memories for part in m.parts if isinstance(part, ErrorFeedback)]
        self._level = logging.DEBUG if rank else logging.WARNING
        self.met: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    def attached(self, optimizer: torch.optim.Optimizer) -> None:
        """Warn if this optimizer will get residuals late."""
        kind, name = family([optimizer]), type(optimizer).__name__
        # those of no known family that have the settings of Lion and its like, or of Rprop, may rescale updates too
        rescales = kind is None and any("betas" in g or "etas" in g for g in optimizer.param_groups)
        text = _warning(name, kind) if kind not in (None, "sgd") else _UNMEASURED.format(name=name) if rescales else ""
        if self.feedback and text:
            self.feedback = []
            _log.log(self._level, "%s", text)

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Warn the first time that there is a residual when this optimizer steps."""
        if any(memory.waits() for memory in self.feedback):
            self.met.add(optimizer)
            self.attached(optimizer)


def _warning(name: str, kind: OptimizerName) -> str:
    row = measured(_SAID_OF, kind)
    cost = (
        f": in the bench, {_SAID_OF} ended at {row.ratio:.2f} times uncompressed training's loss; others differ"
        if row
        else ""
    )
    return (
        f"{name} rescales each update, so with error feedback elements that are sent rarely hardly move{cost}. Use "
        f"{INSTEAD[kind]} or a recipe without error feedback, such as qsgd: docs/how-to/choose-a-recipe.md"
    )


@final
class RescaledUpdatesAdvice:
    """Warns once, on rank 0, of optimizers whose second moment is of gradients while updates arrive, or the reverse."""

    def __init__(self, parameters: Collection[nn.Parameter], rank: int) -> None:
        self._parameters, self._unsaid = set(parameters), {"unsuited", "begins"}
        self._met: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._level = logging.DEBUG if rank else logging.WARNING

    def meets(self, optimizer: torch.optim.Optimizer) -> bool:
        """Warn if updates do not suit this optimizer. Return whether it is the first time that they meet."""
        if optimizer in self._met:
            return False
        self._met.add(optimizer)
        why = _WHY.get(family([optimizer]))
        groups = optimizer.param_groups if why and "unsuited" in self._unsaid else ()
        if any(p in self._parameters for group in groups for p in group["params"]):
            self._unsaid.discard("unsuited")
            _log.log(
                self._level,
                "%s %s: recipes.orthogonal orthogonalises before sending. With it, use AdamW, which normalises what it "
                "gets, or use another recipe: docs/how-to/choose-a-recipe.md",
                type(optimizer).__name__,
                why,
            )
        return True

    def begins(self, optimizer: torch.optim.Optimizer, p: nn.Parameter) -> None:
        """Warn if the optimizer has a second moment of the gradients of `p`, after which updates come."""
        if "begins" in self._unsaid and p in self._parameters and _has_squares(optimizer, p):
            self._unsaid.discard("begins")
            _log.log(
                self._level,
                "%s has a second moment from gradients, and recipes.orthogonal delivers much larger updates: the "
                "first steps will be up to 1/√(1-β₂) times too large. Attach before the "
                "first step, or reset the optimizer: optimizer.state.clear() before attach",
                type(optimizer).__name__,
            )

    def ends(self) -> None:
        """Warn if an optimizer has a second moment of updates, after which gradients come."""
        for name in {type(each).__name__ for each in self._met if any(_has_squares(each, p) for p in self._parameters)}:
            _log.log(
                self._level,
                "%s has a second moment from orthogonalised updates, which are much larger than gradients: its steps "
                "will be far too small until that has decayed. Reset it now: "
                "optimizer.state.clear()",
                name,
            )


@torch.no_grad()
def _has_squares(optimizer: torch.optim.Optimizer, p: nn.Parameter) -> bool:
    state = optimizer.state.get(p, {})
    return any(key in state and bool(state[key].any()) for key in _SQUARES)

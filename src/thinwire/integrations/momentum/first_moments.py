"""What kind of optimizer is this, where does it have momentum, and how is that taken out and put back?"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.errors import MomentumError
from thinwire.integrations.momentum.handover import Settings, first_moment_of, has_momentum
from thinwire.integrations.training.gradients import local, shaped_like
from thinwire.integrations.training.optimizers import step_of
from thinwire.planner.losses import OptimizerName

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
    buffer = state.get(kind.buffer)
    if buffer is None:
        buffer = optimizer.state[p][kind.buffer] = torch.zeros_like(p, memory_format=torch.preserve_format)
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

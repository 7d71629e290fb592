"""Orthogonalised updates in front of an optimizer that needs the gradient's length, or orthogonalises: said once."""

import logging
import weakref
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import final

import torch
from torch import nn

from thinwire.integrations.momentum.families import family
from thinwire.planner.losses import OptimizerName

_log = logging.getLogger("thinwire")
_WHY: Mapping[OptimizerName | None, str] = MappingProxyType(
    {
        "sgd": "takes steps as long as its gradient, which no longer says how large the gradients were",
        "muon": "orthogonalises a second time, and amplifies the directions of which little was sent",
    }
)
_SQUARES = "exp_avg_sq", "exp_inf", "square_avg", "sum", "row_var", "variance"
"""What optimizers call the second moment that they divide by the root of."""


@final
class LostLength:
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
                "%s divides by the root of a second moment that is of gradients, and what recipes.orthogonal delivers "
                "is many times as long: its first steps will be up to 1/√(1-β₂) times too long. Attach before the "
                "first step, or reset the optimizer: optimizer.state.clear() before attach",
                type(optimizer).__name__,
            )

    def ends(self) -> None:
        """Warn if an optimizer has a second moment of updates, after which gradients come."""
        for name in {type(each).__name__ for each in self._met if any(_has_squares(each, p) for p in self._parameters)}:
            _log.log(
                self._level,
                "%s divides by the root of a second moment that is of orthogonalised updates, many times as long as "
                "gradients are: its steps will be far too short until that has faded. Reset it now: "
                "optimizer.state.clear()",
                name,
            )


@torch.no_grad()
def _has_squares(optimizer: torch.optim.Optimizer, p: nn.Parameter) -> bool:
    state = optimizer.state.get(p, {})
    return any(key in state and bool(state[key].any()) for key in _SQUARES)

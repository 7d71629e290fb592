"""What is said once of an optimizer that a recipe does not suit.

Error feedback stands in front of one that rescales updates, or orthogonalised updates in front of one that needs the
gradient's length or orthogonalises itself.
"""

import logging
import weakref
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import final

import torch
from torch import nn

from thinwire.integrations.momentum.first_moments import family
from thinwire.memories import ErrorFeedback, Memory
from thinwire.planner.losses import INSTEAD, OptimizerName, measured

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
        f"{INSTEAD[kind]} or a recipe without error feedback: docs/how-to/choose-a-recipe.md"
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

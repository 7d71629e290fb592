"""Error feedback in front of an optimizer that rescales updates: what that costs, said once."""

import logging
import weakref
from collections.abc import Sequence

import torch

from thinwire.integrations.momentum.families import family
from thinwire.memories import ErrorFeedback, Memory
from thinwire.planner.losses import INSTEAD, OptimizerName, measured

_log = logging.getLogger("thinwire")
_SAID_OF = "topk:0.01"


class Starvation:
    """Warns once, on rank 0, when error feedback meets an optimizer that rescales: it moves what is sent rarely too
    little.
    """

    def __init__(self, memories: Sequence[Memory], rank: int) -> None:
        self._feedback = [part for m in memories for part in m.parts if isinstance(part, ErrorFeedback)]
        self._level = logging.DEBUG if rank else logging.WARNING
        self._met: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    def attached(self, optimizer: torch.optim.Optimizer) -> None:
        """Warn if this optimizer will get residuals late."""
        kind, name = family([optimizer]), type(optimizer).__name__
        text = _warning(name, kind) if kind not in (None, "sgd") else _unmeasured(name) if _rescales(optimizer) else ""
        if self._feedback and text:
            self._feedback = []
            _log.log(self._level, "%s", text)

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Warn the first time that there is a residual when this optimizer steps."""
        if self._feedback and optimizer not in self._met and any(memory.waits() for memory in self._feedback):
            self._met.add(optimizer)
            self.attached(optimizer)


def _warning(name: str, kind: OptimizerName) -> str:
    row = measured(_SAID_OF, kind)
    cost = (
        f": in the bench, {_SAID_OF} ended at {row.ratio:.2f} times uncompressed training's loss; others differ"
        if row
        else ""
    )
    return (
        f"{name} rescales each update, so error feedback in front of it starves what is sent rarely{cost}. Use "
        f"{INSTEAD[kind]} or a recipe without error feedback: docs/how-to/choose-a-recipe.md"
    )


def _unmeasured(name: str) -> str:
    return (
        f"{name} may take signs or rescale each update, so error feedback in front of it may starve what is sent "
        "rarely. Nothing was measured of it: compare with uncompressed training, or use a recipe without error "
        "feedback: docs/how-to/choose-a-recipe.md"
    )


def _rescales(optimizer: torch.optim.Optimizer) -> bool:
    """Whether one that is of no known family has the settings of Lion and its like, or of Rprop."""
    return family([optimizer]) is None and any("betas" in g or "etas" in g for g in optimizer.param_groups)

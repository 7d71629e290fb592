"""Optimizers that train a worker's parameters in place of those whose steps count: nothing is exchanged then."""

import logging
from collections.abc import Collection
from typing import final

import torch

from thinwire.integrations.training.optimizers import observe

_log = logging.getLogger("thinwire")


@final
class Strangers:
    """Counts steps of other optimizers with these parameters since the latest step that counts."""

    def __init__(self, parameters: Collection[int], optimizers: Collection[torch.optim.Optimizer]) -> None:
        self._parameters, self._optimizers = parameters, optimizers
        self._steps, self.due = 0, 0
        observe(self)

    def about_to_take(self, optimizer: torch.optim.Optimizer) -> None:
        """Let it."""

    def taken(self, optimizer: torch.optim.Optimizer, *, evaluated: bool = False) -> None:
        """Warn once if more than `due` steps have gone by: one alone may be that of a wrapper."""
        if optimizer in self._optimizers:
            self._steps = 0
        elif any(id(p) in self._parameters for group in optimizer.param_groups for p in group["params"]):
            self._steps += 1
            if self._steps == self.due + 1:
                _log.warning(_STRANGER, type(optimizer).__name__, self._steps)


_STRANGER = (
    "a %s that outer() was not given trains this worker's parameters, and has taken the latest %d steps: they are not "
    "counted, so that no outer step follows. On every worker, remove() this handle, and make another with the optimizer"
)

"""Orthogonalised updates in front of an optimizer that needs the gradient's length, or orthogonalises: said once."""

import logging
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import final

import torch
from torch import nn

from thinwire.integrations.families import family
from thinwire.planner.losses import OptimizerName

_log = logging.getLogger("thinwire")
_WHY: Mapping[OptimizerName | None, str] = MappingProxyType(
    {
        "sgd": "steps as far as what arrives is long, which no longer says how large the gradients were",
        "muon": "orthogonalises what arrives once more, and makes much of the directions that were hardly sent",
    }
)


@final
class LostLength:
    """Warns once, on rank 0, when an optimizer that this does not suit updates any of these parameters."""

    def __init__(self, parameters: Collection[nn.Parameter], rank: int) -> None:
        self._parameters = set(parameters)
        self._level = logging.DEBUG if rank else logging.WARNING

    def meets(self, optimizer: torch.optim.Optimizer) -> None:
        """Warn if it is such an optimizer."""
        why = _WHY.get(family([optimizer]))
        groups = optimizer.param_groups if why and self._parameters else ()
        if any(p in self._parameters for group in groups for p in group["params"]):
            self._parameters = set()
            _log.log(
                self._level,
                "%s %s: recipes.orthogonal has orthogonalised it before sending. Take AdamW with it, which normalises "
                "what arrives, or another recipe: docs/how-to/choose-a-recipe.md",
                type(optimizer).__name__,
                why,
            )

"""What kind of optimizer is this? Its settings tell, for those of other libraries too."""

from collections.abc import Sequence

import torch

from thinwire.planner.losses import OptimizerName

# What only these have in their groups. Whoever has eps divides by a root; Muon has one too, and comes first.
_TELLING: dict[str, OptimizerName] = {"ns_steps": "muon", "dampening": "sgd", "eps": "adamw"}
_STRICTEST_FIRST: tuple[OptimizerName, ...] = ("muon", "adamw", "sgd")


def family(optimizers: Sequence[torch.optim.Optimizer]) -> OptimizerName | None:
    """Return what optimizers that together train a model count as: muon or adamw as soon as one is; None if unknown."""
    settings = [each.param_groups[0] if each.param_groups else {} for each in optimizers]
    found = [next((name for key, name in _TELLING.items() if key in first), None) for first in settings]
    return None if None in found else next((name for name in _STRICTEST_FIRST if name in found), None)

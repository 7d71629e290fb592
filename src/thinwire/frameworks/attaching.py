"""`thinwire.attach` as frameworks need it: once for each run, to the model as they have wrapped it."""

import logging
from collections.abc import Sequence
from copy import deepcopy
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.integrations import Attachment, attach
from thinwire.integrations.attachments.attachment import LossScaler
from thinwire.integrations.sharding.fsdp import refuse_sharded
from thinwire.memories import FadingMomentum, MomentumCorrection
from thinwire.planner import Budget, Plan
from thinwire.reducer import Reducer

_log = logging.getLogger("thinwire")

How = Reducer | Plan | Budget | Literal["auto"]


def attached(
    model: nn.Module, how: How, optimizers: Sequence[torch.optim.Optimizer], scaler: LossScaler | None
) -> Attachment:
    """Attach a copy of the recipe: a framework may wrap the model for every run, and each wrapper needs its own."""
    return attach(wrapped(model), deepcopy(how), optimizer=optimizers, scaler=scaler)


def wrapped(model: nn.Module) -> Any:
    """Return the DDP model inside what torch.compile has made of it."""
    return getattr(model, "_orig_mod", model)


def check_replicas(model: nn.Module, processes: int, fix: str) -> None:
    """Raise RuntimeError for a single process, and TypeError, with this fix, for a model that is not in DDP."""
    model = wrapped(model)
    if isinstance(model, DistributedDataParallel):
        return
    if processes == 1:
        raise RuntimeError(
            "this is the only process, so there is no other to exchange gradients with: start several, as in "
            "torchrun --nproc-per-node 2, or leave thinwire out"
        )
    refuse_sharded(model, "attach")
    raise TypeError(
        f"thinwire attaches to a model in DistributedDataParallel; got {type(model).__name__} on {processes} "
        f"processes: {fix}"
    )


def say_what_is_clipped(handle: Attachment, setting: str) -> None:
    """Warn that this setting clips momentum too, if the recipe does not clip gradients before it adds them up."""
    memories = handle.recipe.memories()
    parts = [part for memory in memories for part in memory.parts]
    limits = [part.clip_norm for part in parts if isinstance(part, MomentumCorrection | FadingMomentum)]
    if handle.group.rank() == 0 and None in limits:
        _log.warning(
            "%s clips the reduced gradient, which with this recipe includes momentum: to clip each worker's own "
            "gradient instead, set the recipe's clip_norm=",
            setting,
        )

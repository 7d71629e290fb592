"""`thinwire.attach` as frameworks need it: to the model as they wrap it, saved and resumed with it."""

import logging
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only

from thinwire.collectives import all_gather_plain, receive_state, send_state
from thinwire.errors import StateError
from thinwire.integrations import Attachment, Checkpoint, attach
from thinwire.integrations.attachments.attachment import LossScaler
from thinwire.integrations.sharding.fsdp import refuse_sharded
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


MISSING = (
    "nothing was loaded, as there is nothing of thinwire's in {place}: it was saved without thinwire. To resume from "
    "it with empty memories, pass missing_ok=True"
)


def save(handle: Attachment, folder: Path) -> None:
    """Write every rank's part into a folder, with torch.distributed.checkpoint. A collective."""
    from torch.distributed.checkpoint import save as write  # type: ignore[attr-defined]  # not exported, as mypy has it

    write({"thinwire": Checkpoint(handle)}, checkpoint_id=folder, process_group=handle.group)
    seen = _seen(handle, folder)
    if handle.group.rank() == 0 and not all(seen):
        _log.warning(
            "rank %d does not see what rank 0 wrote into %s: to resume, all ranks' files must be in one folder. Save "
            "on a file system that all hosts share, or copy them together",
            seen.index(False),
            folder,
        )


def load(handle: Attachment, folder: Path, *, missing_ok: bool) -> None:
    """Resume from what `save` wrote, also with another number of ranks. A collective.

    Raises StateError as `thinwire.Checkpoint` does, and, unless `missing_ok`, if there is no such folder.
    """
    loading(handle, folder, missing_ok=missing_ok)()


def loading(handle: Attachment, folder: Path, *, missing_ok: bool) -> Callable[[], None]:
    """Read and check what `load` loads. Return what then has the handle resume from it; both are collectives."""
    if any(_seen(handle, folder)):
        checkpoint = Checkpoint(handle, folder)
        entry = checkpoint.state_dict()
        return lambda: checkpoint.load_state_dict(entry)
    if not missing_ok:
        raise StateError(MISSING.format(place=folder.parent))
    return handle.forget if handle.step else lambda: None  # it is of later steps


def gathered(handle: Attachment) -> list[Mapping[str, Any]]:
    """Return on rank 0 what every rank must save, in host memory, and an empty list elsewhere. A collective."""
    group, mine = handle.group, tree_map_only(Tensor, Tensor.cpu, handle.state_dict())
    states = [mine] if group.rank() == 0 else []
    for rank in range(1, group.size()):  # one at a time: over NCCL each passes through rank 0's GPU
        if group.rank() == rank:
            send_state(mine, group, 0)
        elif group.rank() == 0:
            states.append(receive_state(group, rank))
    return states


def _seen(handle: Attachment, folder: Path) -> list[bool]:
    """Return for each rank whether it sees a checkpoint in this folder. A collective."""
    return all_gather_plain((folder / ".metadata").exists(), handle.group)

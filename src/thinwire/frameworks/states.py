"""Residuals in a framework's checkpoints: they differ by rank, and frameworks save what rank 0 has."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map_only

from thinwire.collectives import all_gather_plain, receive_state, send_state
from thinwire.errors import StateError
from thinwire.integrations import Attachment, Checkpoint

_log = logging.getLogger("thinwire")

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
    from torch.distributed.checkpoint import load as read  # type: ignore[attr-defined]  # likewise

    if any(_seen(handle, folder)):
        read({"thinwire": Checkpoint(handle, folder)}, checkpoint_id=folder, process_group=handle.group)
    elif not missing_ok:
        raise StateError(MISSING.format(place=folder.parent))
    elif handle.step:
        handle.forget()  # it is of later steps


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

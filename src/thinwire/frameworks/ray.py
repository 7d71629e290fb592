"""Ray Train: models for `thinwire.attach`, and checkpoints in which every worker has its part.

Ray merges what all workers report into one directory. So each worker writes files of its own, as
torch.distributed.checkpoint does.
"""

from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from ray.train.torch import prepare_model as prepared_by_ray
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.checked import checked
from thinwire.integrations import Attachment, Checkpoint, Replicas, Shards

_FOLDER = "thinwire"
_dcp: Any = dcp  # whose names are not exported, as mypy has it


def prepare_model(model: nn.Module, **options: Any) -> DistributedDataParallel:
    """Return what `ray.train.torch.prepare_model(model, **options)` does, always wrapped in DistributedDataParallel.

    Ray leaves the model of a single worker as it is, and `thinwire.attach` needs DDP.

    Raises:
        ValueError: For a `parallel_strategy` other than "ddp".
    """
    strategy = options.get("parallel_strategy", "ddp")
    if strategy != "ddp":
        raise ValueError(
            f'parallel_strategy is {strategy!r}; expected "ddp": Ray shards with FSDP1, whose gradients no recipe can '
            "reach. Shard with fully_shard yourself, and call thinwire.shard"
        )
    prepared = prepared_by_ray(model, **options)
    if isinstance(prepared, DistributedDataParallel):
        return prepared
    return DistributedDataParallel(prepared, **options.get("parallel_strategy_kwargs") or {})


@checked
def save(handle: Attachment | Replicas | Shards, directory: str | Path) -> None:
    """Save this worker's residual in `directory`, beside your own files; a collective.

    Report the directory from every worker: `ray.train.report(metrics, checkpoint=Checkpoint.from_directory(...))`. What
    a worker does not report is not in the checkpoint.
    """
    _dcp.save({_FOLDER: Checkpoint(handle)}, checkpoint_id=Path(directory) / _FOLDER)


@checked
def load(handle: Attachment | Replicas | Shards, directory: str | Path, *, partial: bool = False) -> None:
    """Resume from what all workers have saved, after model and optimizer have been loaded; a collective.

    There may be more or fewer workers now, as `thinwire.redistribute` says.

    Args:
        handle: What `thinwire.attach` or `thinwire.shard` returned.
        directory: The directory of the merged checkpoint:
            `with ray.train.get_checkpoint().as_directory() as directory`.
        partial: Whether to go on without workers that have not reported theirs.

    Raises:
        StateError: On every worker, if anything is missing, damaged or of another recipe.
    """
    path = Path(directory) / _FOLDER
    _dcp.load({_FOLDER: Checkpoint(handle, path, partial=partial)}, checkpoint_id=path)

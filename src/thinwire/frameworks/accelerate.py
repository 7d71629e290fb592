"""Accelerate: attach after `prepare`. `save_state` and `load_state` then include every rank's state."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from torch import nn

from thinwire.checked import checked
from thinwire.frameworks.attaching import How, attached, check_replicas, loading, save
from thinwire.integrations import Attachment
from thinwire.integrations.attachments.assembly import Optimizers

__all__ = ["attach"]


@checked
def attach(
    accelerator: Accelerator, model: nn.Module, how: How, *, optimizer: Optimizers = None, missing_ok: bool = False
) -> Attachment:
    """Compress the gradients of a model that `accelerator.prepare` returned; a collective.

    `accelerator.save_state` then writes every rank's state into the folder `thinwire` of the checkpoint. `load_state`
    reads it, also on another number of ranks, and raises StateError as `thinwire.Checkpoint` does.

    Args:
        accelerator: The one that prepared the model.
        model: What `prepare` returned.
        how: As in `thinwire.attach`. The accelerator's GradScaler is passed on.
        optimizer: As in `thinwire.attach`, as `prepare` returned it.
        missing_ok: Whether to go on, with empty memories, from a checkpoint that was saved without thinwire.

    Returns:
        What `thinwire.attach` returned.

    Raises:
        TypeError: For a model that is not prepared, or is sharded.
        RuntimeError: For a single process; and whatever `thinwire.attach` raises.
    """
    check_replicas(model, accelerator.num_processes, "pass what accelerator.prepare returned, without DeepSpeed")
    given = optimizer if isinstance(optimizer, Iterable) else [] if optimizer is None else [optimizer]
    optimizers = [getattr(each, "optimizer", each) for each in given]  # its wrapper's steps cannot be followed
    handle = attached(model, how, optimizers, accelerator.scaler)
    module = _bare(accelerator, model)

    def parts(models: list[nn.Module], folder: str) -> list[Path]:
        """Return where this model's part is: one place, or none once the accelerator or the handle has let go of it."""
        places = [i for i, each in enumerate(models) if _bare(accelerator, each) is module and not handle.ended]
        return [Path(folder, f"thinwire_{i}" if i else "thinwire") for i in places]  # numbered as Accelerate's files

    def on_save(models: list[nn.Module], weights: object, folder: str) -> None:
        for part in parts(models, folder):
            save(handle, part)

    def reading(models: list[nn.Module], folder: str) -> list[Callable[[], None]]:
        return [loading(handle, part, missing_ok=missing_ok) for part in parts(models, folder)]

    accelerator.register_save_state_pre_hook(on_save)
    readers = vars(accelerator).setdefault("_thinwire_readers", [])
    if not readers:
        accelerator.register_load_state_pre_hook(partial(_load, readers))
    readers.append(reading)
    return handle


_Reading = Callable[[list[nn.Module], str], list[Callable[[], None]]]


def _load(readers: Sequence[_Reading], models: list[nn.Module], folder: str) -> None:
    """Have all models of an accelerator resume, or none: all parts are read and checked first."""
    found = [take for reading in readers for take in reading(models, folder)]
    for take in found:
        take()


def _bare(accelerator: Accelerator, model: nn.Module) -> Any:
    return accelerator.unwrap_model(model, keep_torch_compile=False)

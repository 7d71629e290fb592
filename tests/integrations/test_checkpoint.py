"""A handle in torch.distributed.checkpoint: saved by so many ranks, loaded by as many or by others."""

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from cases import RECIPES
from ddp_models import Training, digest, same
from ranks import Ranks, told
from torch import Tensor, nn

import thinwire as tw
from thinwire.collectives import Group

STATEFUL = [name for name, case in RECIPES.items() if any(memory.stateful for memory in case.make().memories())]
FEW = ["topk", "dgc", "powersgd", "fading", "dct_dp"]


def _trained(recipe: str, steps: range = range(4), **options: Any) -> Training:
    return Training("several buckets", recipe, **options).run(steps)


def _all_of(training: Training, checkpoint: tw.Checkpoint) -> dict[str, Any]:
    """What a training must save. DCP loads tensors of the model in place."""
    return {"model": training.model.module.state_dict(), "thinwire": checkpoint}


def _saved(training: Training, path: str) -> None:
    """Save everything. The optimizer's state is the same on all ranks, as is the model's."""
    state = _all_of(training, tw.Checkpoint(training.attachment))
    dcp.save(state, checkpoint_id=path)
    if dist.get_rank() == 0:
        torch.save(training.optimizer.state_dict(), f"{path}/optimizer.pt")
    dist.barrier()


def _loaded(recipe: str, path: str, **options: Any) -> Training:
    training = Training("several buckets", recipe)
    dcp.load(_all_of(training, tw.Checkpoint(training.attachment, path, **options)), checkpoint_id=path)
    training.optimizer.load_state_dict(torch.load(f"{path}/optimizer.pt"))
    return training


# --- the same number of ranks ---


def _resumed(recipe: str, path: str) -> tuple[bool, bool, bool]:
    old = _trained(recipe)
    _saved(old, path)
    new = _loaded(recipe, path)
    alike = same(new.attachment.state_dict(), old.attachment.state_dict())
    old.run(range(4, 7))
    new.run(range(4, 7))
    return alike, digest(new.model) == digest(old.model), same(old.attachment.state_dict(), new.attachment.state_dict())


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_resumed_run_makes_the_same_next_steps(ranks: Ranks, recipe: str, tmp_path: Path) -> None:
    assert ranks.run(2, _resumed, recipe, str(tmp_path)) == [(True, True, True)] * 2


def _saved_meanwhile(recipe: str, path: str) -> tuple[bool, bool]:
    """Train on while the checkpoint is being written."""
    training = _trained(recipe)
    apart = dist.new_group()
    assert apart is not None
    state, before = tw.Checkpoint(training.attachment), training.attachment.state_dict()
    written = dcp.async_save({"thinwire": state}, checkpoint_id=path, process_group=apart)
    training.run(range(4, 7))
    written.result()
    moved = not same(training.attachment.state_dict(), before)
    dcp.load({"thinwire": tw.Checkpoint(training.attachment, path)}, checkpoint_id=path)
    dist.destroy_process_group(apart)
    return moved, same(training.attachment.state_dict(), before)


@pytest.mark.parametrize("recipe", FEW)
def test_training_goes_on_while_it_is_saved(ranks: Ranks, recipe: str, tmp_path: Path) -> None:
    assert ranks.run(2, _saved_meanwhile, recipe, str(tmp_path)) == [(True, True)] * 2

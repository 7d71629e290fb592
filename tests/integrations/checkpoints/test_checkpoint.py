"""A handle in torch.distributed.checkpoint: saved by so many ranks, loaded by as many or by others."""

import re
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from cases import RECIPES
from ddp_models import Training, digest, same
from ranks import Ranks, told
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import thinwire as tw
from thinwire.collectives import Group

dcp: Any = torch.distributed.checkpoint  # torch does not export the names in it, as mypy has it

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


class _App:
    """Model and optimizer as torch's own helpers save them, in what its documentation calls an application's state."""

    def __init__(self, training: Training) -> None:
        self.training = training

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.training.model, self.training.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        # not strict: an optimizer without momentum has no state
        options = StateDictOptions(strict=False)
        set_state_dict(
            self.training.model,
            self.training.optimizer,
            model_state_dict=saved["model"],
            optim_state_dict=saved["optimizer"],
            options=options,
        )


def _resumed_by_helpers(recipe: str, path: str) -> bool:
    old = _trained(recipe, weight_decay=0.01)
    dcp.save({"app": _App(old), "thinwire": tw.Checkpoint(old.attachment)}, checkpoint_id=path)
    new = Training("several buckets", recipe, weight_decay=0.01)
    dcp.load({"app": _App(new), "thinwire": tw.Checkpoint(new.attachment, path)}, checkpoint_id=path)
    old.run(range(4, 7))
    new.run(range(4, 7))
    alike = same(old.attachment.state_dict(), new.attachment.state_dict())
    return alike and digest(old.model) == digest(new.model)


@pytest.mark.parametrize("recipe", FEW)
def test_an_optimizer_resumes_by_torch_own_helpers(ranks: Ranks, recipe: str, tmp_path: Path) -> None:
    assert ranks.run(2, _resumed_by_helpers, recipe, str(tmp_path)) == [True] * 2


# --- another number of ranks ---


def _pending(training: Training) -> dict[str, Tensor]:
    """Return the sums over ranks of what waits, in float64. A collective."""
    sums: dict[str, Tensor] = {}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, training.attachment.state_dict()["memories"])
    for memories in everyone:
        for i, memory in enumerate(memories):
            for name, fields in memory.items():
                for field in fields.keys() - {"note"}:
                    key = f"{i} {name} {field}"
                    sums[key] = sums.get(key, 0) + fields[field].to(torch.float64)
    return sums


def _started(recipe: str, path: str) -> dict[str, Tensor]:
    training = _trained(recipe, dtype=torch.float64)
    _saved(training, path)
    return _pending(training)


def _moved_on(recipe: str, path: str, then: str) -> tuple[dict[str, Tensor], int, bool, dict[str, Tensor]]:
    """Load from one place, train, and save in another. Return what waits, at first and at last."""
    training = Training("several buckets", recipe, dtype=torch.float64)
    saved = tw.Checkpoint(training.attachment, path)
    dcp.load(_all_of(training, saved), checkpoint_id=path)
    training.optimizer.load_state_dict(torch.load(f"{path}/optimizer.pt"))
    first, step = _pending(training), training.attachment.step
    training.run(range(4, 7))
    _saved(training, then)
    return first, step, training.attachment.verify_replicas(), _pending(training)


def _close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    """Whether the pending means agree to 1e-12 of the largest."""
    assert found.keys() == expected.keys()
    assert expected
    return all(
        bool(((found[key] - x).abs() <= 1e-12 * x.abs().amax()).all()) for key, x in expected.items() if x.numel()
    )


@pytest.mark.parametrize("recipe", STATEFUL)
def test_the_pending_mean_survives_two_three_and_one_ranks(ranks: Ranks, recipe: str, tmp_path: Path) -> None:
    paths = [str(tmp_path / name) for name in ("two", "three", "one")]
    waiting, step = ranks.run(2, _started, recipe, paths[0])[0], 4
    for count, path, then in zip((3, 1), paths, paths[1:], strict=False):
        everyone = ranks.run(count, _moved_on, recipe, path, then)
        for first, found, alike, _ in everyone:
            assert _close(first, waiting)
            assert (found, alike) == (step, True)
        waiting, step = everyone[0][3], step + 3


# --- what cannot be loaded changes nothing ---


def _standing(training: Training) -> dict[str, Any]:
    held = {"optimizer": training.optimizer.state_dict(), "thinwire": training.attachment.state_dict()}
    return {**held, "model": {name: p.detach().clone() for name, p in training.parameters().items()}}


def _tried(training: Training, path: str, **options: Any) -> str:
    """Load, and return what that raises; or, if something has changed, what it was."""
    before = _standing(training)
    checkpoint = tw.Checkpoint(training.attachment, path, **options)
    said = told(lambda: dcp.load(_all_of(training, checkpoint), checkpoint_id=path))
    return said if said == "nothing" or same(_standing(training), before) else f"{said}, and the state has changed"


def _damaged(recipe: str, path: str, damages: list[tuple[str, str, float]]) -> list[str]:
    """Damage copies of a checkpoint. Return what happened instead of an error that changes nothing."""
    training = _trained(recipe)
    checkpoint = tw.Checkpoint(training.attachment)
    dcp.save({"thinwire": checkpoint}, checkpoint_id=path)
    whole = training.attachment.state_dict()
    training.run(range(4, 6))
    wrong = []
    for i, (file, kind, where) in enumerate(damages):
        copy = f"{path}-{i}"
        if dist.get_rank() == 0:
            shutil.copytree(path, copy)
            _damage(Path(copy) / file, kind, where)
        dist.barrier()
        before = _standing(training)
        saved = tw.Checkpoint(training.attachment, copy)
        said = told(lambda saved=saved, copy=copy: dcp.load({"thinwire": saved}, checkpoint_id=copy))
        unnoticed = said == "nothing" and kind == "flip" and same(training.attachment.state_dict(), whole)
        if unnoticed:  # a byte that is padding, or a file's date
            training.attachment.load_state_dict(before["thinwire"])
        elif not said.startswith("StateError: nothing was loaded") or not same(_standing(training), before):
            wrong.append(f"{file}, {kind} at {where}: {said}")
    return wrong


def _damage(file: Path, kind: str, where: float) -> None:
    raw = bytearray(file.read_bytes())
    place = int(where * len(raw))
    if kind == "gone":
        file.unlink()
        return
    if kind == "step":  # '"step": 4' becomes 5
        place, kind = raw.index(b'"step": ') + len(b'"step": '), "flip"
    if kind == "flip":
        raw[place] ^= 1
    file.write_bytes(raw if kind == "flip" else raw[:place])


DAMAGES = [
    *((file, "gone", 0.0) for file in ("__0_0.distcp", "__1_0.distcp", ".metadata")),
    *((file, "cut", at) for file in ("__0_0.distcp", "__1_0.distcp", ".metadata") for at in (0.0, 0.1, 0.5, 0.9)),
    *((file, "flip", i / 23) for file in ("__0_0.distcp", "__1_0.distcp") for i in range(23)),
]


@pytest.mark.parametrize("recipe", ["topk", "dgc"])
@pytest.mark.first(1)
def test_a_damaged_checkpoint_is_an_error_that_changes_nothing(ranks: Ranks, recipe: str, tmp_path: Path) -> None:
    assert ranks.run(2, _damaged, recipe, str(tmp_path / "saved"), DAMAGES) == [[]] * 2


def test_a_header_that_has_changed_is_noticed(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(1, _damaged, "topk", str(tmp_path / "saved"), [("__0_0.distcp", "step", 0.0)]) == [[]]


def _cut_off(path: str) -> list[str]:
    """Load model and all from a checkpoint of which one rank's file ends early."""
    _saved(_trained("topk"), path)
    if dist.get_rank() == 0:
        _damage(Path(path) / "__1_0.distcp", "cut", 0.2)
    dist.barrier()
    return [_tried(_trained("topk", range(7)), path)]


def test_a_model_is_not_loaded_where_what_waits_cannot_be(ranks: Ranks, tmp_path: Path) -> None:
    for (said,) in ranks.run(2, _cut_off, str(tmp_path)):
        assert said.startswith("StateError: nothing was loaded, as what rank 1 saved cannot be read (")
        assert said.endswith("or go on without its residuals: Checkpoint(..., partial=True)")


def _of_two_steps(path: str) -> str:
    """Load a checkpoint in which one rank's file is that of a later one."""
    for name, steps in (("early", range(4)), ("late", range(11))):
        _saved(_trained("topk", steps), f"{path}/{name}")
    if dist.get_rank() == 0:
        shutil.copy(f"{path}/late/__1_0.distcp", f"{path}/early/__1_0.distcp")
    dist.barrier()
    return _tried(_trained("topk", range(7)), f"{path}/early")


def test_a_file_of_another_step_is_an_error_that_says_so(ranks: Ranks, tmp_path: Path) -> None:
    for said in ranks.run(2, _of_two_steps, str(tmp_path)):
        assert said.startswith("StateError")
        assert "step" in said


def _other_recipe(path: str) -> str:
    _saved(_trained("dgc"), path)
    return _tried(_trained("topk", range(7)), path)


def test_a_model_is_not_loaded_where_the_recipe_has_other_memories(ranks: Ranks, tmp_path: Path) -> None:
    for said in ranks.run(2, _other_recipe, str(tmp_path)):
        assert said.startswith("StateError: nothing was loaded: attachment state was saved from a recipe with a differ")
        assert re.search(r"it keeps \[.*'velocity'.*\].*attached \[\[\], \['residual'\]\]: attach that", said)


def _mixed(path: str, change: dict[str, Any]) -> str:
    """Save a state that differs on rank 1, as after a step that only one rank has made."""
    training = _trained("topk")
    state = training.attachment.state_dict() | (change if dist.get_rank() else {})
    training.attachment.state_dict = lambda: state  # type: ignore[method-assign]  # for this one rank
    dcp.save({"thinwire": tw.Checkpoint(training.attachment)}, checkpoint_id=path)
    return _tried(_trained("topk", range(7)), path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"step": 5}, "step is 4 on rank 0 and 5 on rank 1"),
        ({"recipe": "Another()"}, "and 'Another()' on rank 1"),
        ({"loss_scale": 2.0}, "loss_scale is 1.0 on rank 0 and 2.0 on rank 1"),
    ],
)
def test_a_mixture_is_refused_with_its_difference(
    ranks: Ranks, tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    for said in ranks.run(2, _mixed, str(tmp_path), change):
        assert said.startswith("StateError: nothing was loaded")
        assert words in said


def _misused(path: str) -> list[str]:
    training = _trained("topk")
    handle = training.attachment
    dcp.save({"thinwire": handle}, checkpoint_id=f"{path}/plain")
    dcp.save({"model": training.model.module.state_dict()}, checkpoint_id=f"{path}/none")
    two = {"one": tw.Checkpoint(handle), "two": tw.Checkpoint(handle)}
    dcp.save(two, checkpoint_id=f"{path}/two")

    def load(place: str, under: str = "thinwire", **options: Any) -> str:
        saved = tw.Checkpoint(handle, f"{path}/{place}", **options)
        return told(lambda: dcp.load({under: saved}, checkpoint_id=f"{path}/{place}"))

    wrong = [load("plain"), load("none"), load("two"), load("two", "three", key="three"), load("nowhere")]
    right = [load("two", "one", key="one"), load("two", "two", key="two")]
    without = told(lambda: dcp.load({"two": tw.Checkpoint(handle)}, checkpoint_id=f"{path}/two"))
    return [*wrong, without, *right]


def test_what_is_not_there_is_refused_with_the_fix(ranks: Ranks, tmp_path: Path) -> None:
    for plain, none, several, other, nowhere, without, *right in ranks.run(2, _misused, str(tmp_path)):
        assert "save thinwire.Checkpoint(handle) instead" in plain
        assert "holds nothing of thinwire's" in none
        assert "key is None; this checkpoint has states of thinwire under 'one', 'two'" in several
        assert "under 'one', 'two'" in other
        assert "cannot be read" in nowhere
        assert without.startswith("ValueError: no path to load from")
        assert right == ["nothing", "nothing"]


# --- without some of the ranks ---


def _one_left(path: str, gone: int) -> tuple[str, bool, bool]:
    """Lose a rank's file, and go on with what is left."""
    old = _trained("dgc")
    dcp.save({"thinwire": tw.Checkpoint(old.attachment)}, checkpoint_id=path)
    if dist.get_rank() == 0:
        _damage(Path(path) / f"__{gone}_0.distcp", "cut", 0.3)
    dist.barrier()
    new = _trained("dgc", range(6))
    whole = told(lambda: dcp.load({"thinwire": tw.Checkpoint(new.attachment, path)}, checkpoint_id=path))
    dcp.load({"thinwire": tw.Checkpoint(new.attachment, path, partial=True)}, checkpoint_id=path)
    waits, saved = new.attachment.waits, same(new.attachment.state_dict(), old.attachment.state_dict())
    return whole, waits == (dist.get_rank() != gone), saved == (dist.get_rank() != gone)


@pytest.mark.parametrize("gone", [0, 1, 2])
def test_a_rank_that_is_gone_takes_only_its_own_share_along(ranks: Ranks, gone: int, tmp_path: Path) -> None:
    for whole, waits, saved in ranks.run(3, _one_left, str(tmp_path / "saved"), gone):
        assert "cannot be read" in whole
        assert (waits, saved) == (True, True)


# --- replicas, and several groups of them ---


def _stages(path: str, several: bool) -> tuple[str, bool]:
    """Two stages of a pipeline with two replicas each: ranks 0 and 2, and 1 and 3."""
    groups: list[Group] = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    rank = dist.get_rank()
    torch.manual_seed(rank % 2)
    stage = nn.Linear(40, 40)
    replicas = tw.replicate(stage, tw.recipes.topk(density=0.1), group=groups[rank % 2])
    stage(torch.randn(8, 40, generator=torch.Generator().manual_seed(rank))).square().sum().backward()
    replicas.reduce()
    replicas.keep_step()
    before, key = replicas.state_dict(), f"stage {rank % 2}" if several else "thinwire"
    dcp.save({key: tw.Checkpoint(replicas)}, checkpoint_id=path)
    replicas.forget()
    saved = tw.Checkpoint(replicas, path, key=key)
    said = told(lambda: dcp.load({key: saved}, checkpoint_id=path))
    alike = same(replicas.state_dict(), before)
    dist.destroy_process_group(groups[rank % 2])
    return said, alike


@pytest.mark.parametrize("several", [True, False])
def test_stages_of_a_pipeline_keep_apart(ranks: Ranks, several: bool, tmp_path: Path) -> None:
    assert ranks.run(4, _stages, str(tmp_path), several) == [("nothing", True)] * 4


def _given(path: str, *each: dict[str, Any]) -> str:
    """Load with what one rank is given, and the other, where the file of one is gone."""
    training = _trained("topk")
    _saved(training, path)
    if dist.get_rank() == 0:
        _damage(Path(path) / "__1_0.distcp", "gone", 0.0)
    dist.barrier()
    state = tw.Checkpoint(training.attachment, **each[dist.get_rank()])
    return told(lambda: dcp.load({"thinwire": state}, checkpoint_id=path))


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({}, "rank 1 none"),
        ({"partial": True}, "rank 1 a path, key=None, partial=True"),
        ({"key": "thinwire"}, "rank 1 a path, key='thinwire', partial=False"),
    ],
)
def test_a_checkpoint_given_otherwise_on_one_rank_is_an_error_on_every_rank(
    ranks: Ranks, tmp_path: Path, other: dict[str, Any], words: str
) -> None:
    path = str(tmp_path)
    for said in ranks.run(2, _given, path, {"saved": path}, other | {"saved": path} if other else {}):
        assert f"(rank 0 a path, key=None, partial=False; {words}): to load" in said


def _failed_on_one() -> str:
    """Save where one rank cannot say what it holds."""
    training = _trained("topk")
    saved = tw.Checkpoint(training.attachment)
    failing = patch.object(training.attachment.membership, "state_dict", side_effect=RuntimeError("out of memory"))
    with failing if dist.get_rank() == 1 else nullcontext():
        return told(saved.state_dict)


def test_what_one_rank_cannot_save_is_an_error_on_every_rank(ranks: Ranks) -> None:
    assert ranks.run(2, _failed_on_one) == ["RuntimeError: rank 1: out of memory", "RuntimeError: out of memory"]


def _saved_before_loading(path: str) -> tuple[str, str]:
    """Save with an object that has yet to load, and then with one that has loaded."""
    training = _trained("topk")
    dcp.save({"thinwire": tw.Checkpoint(training.attachment)}, checkpoint_id=f"{path}/first")
    again = tw.Checkpoint(training.attachment, f"{path}/first")
    refused = "saved"
    try:
        dcp.save({"thinwire": again}, checkpoint_id=f"{path}/second")
    except dcp.CheckpointException as error:  # which is no Exception
        refused = str(error)
    dcp.load({"thinwire": again}, checkpoint_id=f"{path}/first")
    dcp.save({"thinwire": again}, checkpoint_id=f"{path}/third")
    third = tw.Checkpoint(training.attachment, f"{path}/third")
    return refused, told(lambda: dcp.load({"thinwire": third}, checkpoint_id=f"{path}/third"))


def test_what_has_yet_to_load_does_not_save_an_empty_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    for refused, loaded in ranks.run(2, _saved_before_loading, str(tmp_path)):
        assert "has not loaded yet; to save, make it Checkpoint(handle)" in refused
        assert loaded == "nothing"

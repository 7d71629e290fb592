"""Replicas that come and go under torchft, with a real lighthouse."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchft", reason="torchft is not installed: pip install -e '.[torchft]'")

import torch.distributed as dist
from torch import nn

import thinwire as tw
from thinwire.errors import FingerprintError, PayloadError
from thinwire.frameworks import torchft as ours
from thinwire.integrations.attachments import assembly

_distributed: Any = dist  # whose names are not all exported, as mypy has it
Start = Callable[..., "subprocess.Popen[str]"]
REPLICA = Path(__file__).with_name("torchft_replica.py")


@pytest.fixture
def lighthouse() -> Iterator[str]:
    from torchft._torchft import LighthouseServer

    server = LighthouseServer(bind="[::]:0", min_replicas=1, join_timeout_ms=2000, heartbeat_timeout_ms=2000)
    yield server.address()
    server.shutdown()


@pytest.fixture
def start() -> Iterator[Start]:
    """Return what starts a replica. Whatever still runs in the end is killed."""
    started: list[subprocess.Popen[str]] = []
    path = os.pathsep.join([str(Path(tw.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])

    def start(*arguments: str) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            [sys.executable, str(REPLICA), *arguments],
            env=os.environ | {"PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        with process:
            process.kill()


def _lines(output: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["dgc", "powersgd"])
def test_replicas_come_and_go_and_steps_are_called_off(
    recipe: str, start: Start, lighthouse: str, tmp_path: Path
) -> None:
    """The first replica's exchange fails once. The second dies later, and a third comes in its place."""
    pytest.importorskip("transformers", reason="the model is from transformers, which is not installed")
    arguments = (lighthouse, recipe, str(tmp_path), str(REPLICA.parents[2] / "CHANGELOG.md"))
    processes = {name: start(name, *arguments) for name in ("first_0", "second_1", "third_2")}
    printed = {name: process.communicate(timeout=400) for name, process in processes.items()}
    first, second, third = (_lines(printed[name][0]) for name in processes)
    assert first, printed["first_0"][1][-3000:]

    off = [i for i, line in enumerate(first) if not line["kept"]]
    assert 8 in {first[i]["step"] for i in off}
    for i in off:  # a step that was called off has left everything as it was
        assert first[i]["weights"] == first[i - 1]["weights"]
        assert first[i]["waits"] == first[i - 1]["waits"]
    kept = [line["waits"] for line in first if line["kept"] and line["replicas"] == 2]
    assert len(set(kept)) == len(kept) > 20

    together = [{line["step"]: line["weights"] for line in lines if line["kept"]} for lines in (first, second, third)]
    for other in together[1:]:
        assert {step: together[0][step] for step in other} == other
    assert min(together[1]) == 0
    assert max(together[1]) == 13
    assert len(together[2]) == 8
    assert max(together[2]) == max(together[0])
    assert {line["replicas"] for line in first} == {1, 2}
    assert first[-1]["loss"] < first[0]["loss"]


def test_a_replica_of_several_processes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    with pytest.raises(RuntimeError, match="has 2 processes; expected one with the whole model"):
        ours.replicate(_Manager(), ours.ProcessGroupGloo(), nn.Linear(2, 2), tw.recipes.dense())


def test_a_group_without_a_default_one_is_refused() -> None:
    with pytest.raises(RuntimeError, match="call init_process_group first"):
        ours.ProcessGroupGloo()._create_pg(_distributed.HashStore(), 0, 1)


class _Manager:
    """A manager of a replica that takes part, or recovers while the others train on (use_async_quorum=True)."""

    def __init__(self, *, participating: bool = False) -> None:
        self._participating = participating
        self.reported = list[Exception]()

    def register_state_dict_fn(self, key: str, load_state_dict: Any, state_dict: Any) -> None:
        pass

    def wait_quorum(self) -> None:
        pass

    def is_participating(self) -> bool:
        return self._participating

    def errored(self) -> None:
        pass

    def report_error(self, e: Exception) -> None:
        self.reported.append(e)


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", store=_distributed.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_a_replica_that_takes_no_part_is_refused() -> None:
    members = ours.replicate(_Manager(), ours.ProcessGroupGloo(), nn.Linear(2, 2), tw.recipes.dense())
    with pytest.raises(RuntimeError, match="use_async_quorum=False"):
        members.reduce()


@pytest.mark.usefixtures("alone")
def test_a_step_whose_payloads_are_damaged_is_called_off(monkeypatch: pytest.MonkeyPatch) -> None:
    manager, links = _Manager(participating=True), ours.ProcessGroupGloo()
    members = ours.replicate(manager, links, nn.Linear(2, 2), tw.recipes.dense())

    def damaged() -> None:
        raise PayloadError("the buffer has 0 bytes")

    monkeypatch.setattr(members._replicas, "reduce", damaged)
    monkeypatch.setattr(ours.ProcessGroupGloo, "abort", lambda self, errored=True: None)
    links._pg = members.group
    members.reduce()
    assert [str(each) for each in manager.reported] == ["the buffer has 0 bytes"]


@pytest.mark.usefixtures("alone")
def test_replicas_that_disagree_raise_rather_than_call_off_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    links, module = ours.ProcessGroupGloo(), nn.Linear(2, 2)
    members = ours.replicate(_Manager(participating=True), links, module, tw.recipes.dense())

    def differ(*_: object) -> None:
        raise FingerprintError("recipe differs")

    monkeypatch.setattr(assembly, "check_fingerprint", differ)
    links._pg = dist.new_group()  # of the next step's replicas
    with pytest.raises(FingerprintError, match="recipe differs"):
        members.reduce()

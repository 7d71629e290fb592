"""Stages × replicas: a split model trains as a whole one does, and what crosses is what is declared."""

from collections.abc import Callable, Iterator
from threading import Thread
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks, mesh_of
from typer.testing import CliRunner

from thinwire import trace
from thinwire_lab.bench import hybrid, options
from thinwire_lab.bench.options import RowJob
from thinwire_lab.bench.results import Setting
from thinwire_lab.bench.rows import HEADER_BYTES
from thinwire_lab.cli import app
from thinwire_lab.cluster.link import Meter
from thinwire_lab.cluster.local import Cluster
from thinwire_lab.inputs import BadInput
from thinwire_lab.problems import build
from thinwire_lab.problems.base import check_stages

STEPS = 3
JOB = {"steps": STEPS, "most_steps": STEPS, "every": STEPS, "micro_batches": 4}


@pytest.fixture(scope="module")
def four() -> Iterator[Cluster]:
    with Cluster(4, None, "thinwire_lab.bench.worker:handle") as cluster:
        yield cluster


@pytest.fixture(scope="module")
def two() -> Iterator[Cluster]:
    with Cluster(2, None, "thinwire_lab.bench.worker:handle") as cluster:
        yield cluster


def _train(cluster: Cluster, name: str = "transformer", **row: Any) -> list[list[dict[str, Any]]]:
    """Train a row and return the events of each rank."""
    events: dict[int, list[dict[str, Any]]] = {}
    problem = {"name": name, "seed": 0, "data": None, "scale": 1.0}
    for rank, event in cluster.run({"row": {**JOB, "density": 1.0, **row}, "problem": problem}):
        events.setdefault(rank, []).append(event)
    return [events[rank] for rank in sorted(events)]


def _row() -> hybrid.Hybrid:
    job = RowJob(recipe="dense", density=1.0, steps=1, most_steps=1, every=1, stages=2, micro_batches=2)
    with mock.patch.object(hybrid, "mesh", return_value=mesh_of(2, 2, names=("replica", "stage"))):
        return hybrid.Hybrid(job, build("transformer", seed=0, scale=0.1), Meter())


def _decoding_elsewhere() -> dict[str, float]:
    """Take a step in which another thread decodes for as long as this process has run."""
    run = _row()
    with mock.patch.object(run._schedule, "step", side_effect=lambda *_, **__: _in_a_thread(_decode)):
        return run.step(0)


def _decode() -> None:
    trace.took("decode", 0.0)


def _in_a_thread(act: Callable[[], None]) -> None:
    thread = Thread(target=act)
    thread.start()
    thread.join()


def test_what_other_threads_decode_takes_no_computing_away(ranks: Ranks) -> None:
    assert all(split["compute"] > 0 for split in ranks.run(4, _decoding_elsewhere))


def _with_another_last_stage() -> list[str]:
    run = _row()
    if dist.get_rank() == 3:
        next(run._own.parameters()).data.add_(1.0)
    return run.differing()


def test_replicas_of_every_stage_are_compared(ranks: Ranks) -> None:
    first, *others = ranks.run(4, _with_another_last_stage)
    assert len(first) == 1
    assert others == [first] * 3


def _losses(events: list[dict[str, Any]]) -> list[float]:
    return [event["loss"] for event in events if event["kind"] == "loss"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["transformer", "dlrm"])
def test_two_by_two_trains_as_two_whole_replicas_do(four: Cluster, two: Cluster, name: str) -> None:
    whole = _losses(_train(two, name, recipe="dense")[0])
    for events in _train(four, name, recipe="dense", stages=2):
        assert _losses(events) == pytest.approx(whole, rel=1e-4)
        assert events[-1]["different"] == []


@pytest.mark.parametrize(
    ("recipe", "density"),
    [
        pytest.param("gtopk", 0.01, marks=pytest.mark.slow),
        *(
            pytest.param(*other, marks=pytest.mark.slow)
            for other in (
                ("dense", 1.0),
                ("dgc", 0.01),
                ("torch_powersgd", 1.0),
                ("dct_dp", 0.01),
                ("s2_union", 1 / 32),
            )
        ),
    ],
)
def test_any_recipe_keeps_the_replicas_of_a_stage_identical(four: Cluster, recipe: str, density: float) -> None:
    all_events = _train(four, recipe=recipe, density=density, stages=2, boundary=0.1)
    assert all(events[-1]["different"] == [] for events in all_events)
    first, *others = (_losses(events) for events in all_events)
    assert first[-1] < first[0]
    assert all(losses == first for losses in others)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "row"),
    [
        ("adamw", {"recipe": "topk", "density": 0.01}),
        ("muon", {"recipe": "dense", "stages": 2, "boundary": 0.25}),
        pytest.param("muon", {"recipe": "torch_powersgd"}, marks=pytest.mark.slow),
        pytest.param("adamw", {"recipe": "dense", "stages": 2}, marks=pytest.mark.slow),
    ],
)
def test_other_optimizers_train_whole_models_and_stages(two: Cluster, optimizer: str, row: dict[str, Any]) -> None:
    if optimizer == "muon" and not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no Muon")
    for events in _train(two, optimizer=optimizer, **row):
        losses = _losses(events)
        assert losses[-1] < losses[0]
        assert events[-1]["different"] == []
        assert losses[-1] != _losses(_train(two, **row)[0])[-1], "SGD's steps are others"


@pytest.mark.slow
def test_three_stages_in_one_replica() -> None:
    with Cluster(3, None, "thinwire_lab.bench.worker:handle") as three:
        losses = _losses(_train(three, recipe="dense", stages=3, boundary=0.25)[0])
    assert losses[-1] < losses[0]


@pytest.mark.slow
def test_what_a_stage_sends_is_what_it_declares(two: Cluster) -> None:
    """The first stage sends activations, the last one their gradients, in as many bytes; as they are or sparsified."""
    for boundary in (1.0, 0.25):
        for events in _train(two, recipe="dense", stages=2, boundary=boundary):
            step = next(event for event in events if event["kind"] == "step" and event["step"] == STEPS - 1)
            assert step["dense_bytes"] == 12 * 64 * 176 * 4
            # bf16 values and some four bits of index, in place of 32 bits
            expected = step["dense_bytes"] if boundary == 1 else boundary * 20 / 32 * step["dense_bytes"]
            assert step["sent_bytes"] == pytest.approx(expected, rel=0.03)
            if "measured" not in step:
                pytest.skip(two.label)
            tail = events[-3]
            assert tail["kind"] == "tail"
            sent, packets = step["measured"] + tail["measured"], step["packets"] + tail["packets"]
            assert sent - HEADER_BYTES * packets == pytest.approx(step["sent_bytes"], rel=0.03)


def _read(**changes: Any) -> options.Options:
    asked: dict[str, Any] = {"workers": 4, "link": "none", "recipes": "topk,dense", "densities": "0.01", "steps": 1}
    asked |= {"model": "transformer", "data": None, "scale": 1.0, "seed": 0, "target": None, "extend": 1.0}
    return options.read(**asked | changes)


def test_a_pipeline_runs_each_recipe_at_each_boundary() -> None:
    assert _read(pipeline=2).rows() == [
        *(Setting("dense", 1.0, boundary) for boundary in (1.0, 0.05)),
        *(Setting("topk", 0.01, boundary) for boundary in (1.0, 0.05)),
    ]
    assert [line.boundary for line in _read(pipeline=2, recipes="dense", boundaries="0.1").rows()] == [0.1]
    assert {line.boundary for line in _read().rows()} == {1.0}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--pipeline", "3", "--workers", "4"), "does not divide"),
        (("--pipeline", "0"), "does not divide"),
        (("--pipeline", "4", "--workers", "4"), "can be split into 2 or 3 stages"),
        (("--pipeline", "2", "--micro-batches", "5"), "does not divide the batch of 12"),
        (("--pipeline", "2", "--micro-batches", "0"), "expected 1 or more"),
        (("--boundary", "0.1"), "give --pipeline STAGES"),
        (("--pipeline", "2", "--boundary", "2"), "not a share of the elements"),
        (("--pipeline", "2", "--boundary", "x"), "--boundary 'x' is not a list of numbers"),
        (("--pipeline", "2", "--model", "xml"), "cannot be split into stages"),
        (("--pipeline", "2", "--recipes", "auto"), "name a recipe instead"),
    ],
)
def test_what_cannot_be_split_is_refused(args: tuple[str, ...], message: str) -> None:
    done = CliRunner().invoke(app, ["bench", *args])
    assert done.exit_code == 2
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_problem_says_how_it_can_be_split() -> None:
    check_stages(build("transformer", seed=0), 3, 4)
    with pytest.raises(BadInput, match="2 or 3"):
        check_stages(build("transformer", seed=0), 1, 4)

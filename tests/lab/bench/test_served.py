"""Rows on parameter servers: trainers at their own pace, one slow or gone, and losses of what the server has."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from test_report import example
from typer.testing import CliRunner

from thinwire_lab.bench import options
from thinwire_lab.bench.data_parallel import Slowness
from thinwire_lab.bench.methods import BENCHED
from thinwire_lab.bench.options import RowJob
from thinwire_lab.bench.report import html
from thinwire_lab.bench.results import Row, Setting
from thinwire_lab.cli import app
from thinwire_lab.cluster.local import Cluster
from thinwire_lab.cluster.workers import free_ports

STEPS = 6
JOB = {"steps": STEPS, "most_steps": STEPS, "every": 3, "trainers": 2, "servers": 1, "density": 1.0}


@pytest.fixture(scope="module")
def three() -> Iterator[Cluster]:
    with Cluster(3, None, "thinwire_lab.bench.worker:handle") as cluster:
        yield cluster


def _train(cluster: Cluster, **row: Any) -> list[dict[str, Any]]:
    """Train a row of the Transformer and return the first rank's events; the others have none."""
    problem = {"name": "transformer", "seed": 0, "data": None, "scale": 1.0}
    events = list(cluster.run({"row": {**JOB, "ports": free_ports(2), **row}, "problem": problem}))
    assert {rank for rank, _ in events} <= ({0} if row["served"] else {0, 1})
    return [event for rank, event in events if rank == 0]


def _losses(events: list[dict[str, Any]]) -> list[float]:
    return [event["loss"] for event in events if event["kind"] == "loss"]


@pytest.mark.slow
@pytest.mark.parametrize("row", [{"recipe": "dense"}, {"recipe": "dct_dp", "density": 0.05, "kill": True, "slow": 3.0}])
def test_trainers_learn_on_a_server(three: Cluster, row: dict[str, Any]) -> None:
    events = _train(three, served=True, **row)
    losses = _losses(events)
    assert len(losses) == 3
    assert min(losses[1:]) < losses[0]  # at this rate the first steps are rough, with DDP too
    assert sum(event["kind"] == "step" for event in events) == STEPS


@pytest.mark.slow
def test_one_trainer_learns_on_a_server() -> None:
    with Cluster(2, None, "thinwire_lab.bench.worker:handle") as cluster:
        losses = _losses(_train(cluster, served=True, recipe="dense", trainers=1))
    assert min(losses[1:]) < losses[0]


@pytest.mark.slow
def test_the_others_serve_no_row_that_is_not_served(three: Cluster) -> None:
    events = _train(three, recipe="dense", served=False)
    assert events[-1]["different"] == []


def _asked(**changed: Any) -> options.Options:
    given = {"workers": 3, "link": None, "recipes": None, "densities": "0.01", "steps": 10, "model": "transformer"}
    others = {"data": None, "scale": 1.0, "seed": 0, "target": None, "extend": 1.0, "micro_batches": 4}
    return options.read(**{**given, **others, "servers": 1, **changed})


def test_every_recipe_has_a_row_on_ddp_and_one_that_is_served() -> None:
    asked = _asked(recipes="dct_dp,torch_fp16,dense")
    assert asked.processes == 4
    assert asked.rows() == [
        Setting("dense", 1.0),
        Setting("dense", 1.0, served=True),
        Setting("dct_dp", 0.01),
        Setting("dct_dp", 0.01, served=True),
        Setting("torch_fp16", 1.0),
    ]


def test_one_worker_has_served_rows_alone() -> None:
    asked = _asked(workers=1, recipes="dct_dp,dense")
    assert asked.processes == 2
    assert asked.rows() == [Setting("dense", 1.0, served=True), Setting("dct_dp", 0.01, served=True)]
    assert all(each.served for each in _asked(workers=1).rows())


def test_what_trainers_cannot_use_is_not_served() -> None:
    unable = {name for name, recipe in BENCHED.items() if not recipe.served}
    assert {"dgc", "powersgd", "fading", "orthogonal", "auto", "torch_fp16", "torch_powersgd"} <= unable
    assert {"dense", "topk", "dct_dp", "qsgd"}.isdisjoint(unable)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--servers", "-1"], "--servers is -1"),
        (["--servers", "1", "--slow", "0.5"], "--slow is 0.5"),
        (["--slow", "10"], "give --servers 1 or --outer 30 as well"),
        (["--kill"], "give --servers 1 or --outer 30 as well"),
        (["--servers", "1", "--pipeline", "2"], "leave --pipeline and --shard out"),
        (["--servers", "1", "--optimizer", "muon"], "--optimizer sgd or adamw"),
        (["--workers", "1"], "give --workers 2 or more, or --servers 1 as well"),
        (["--servers", "1", "--workers", "0"], "--workers is 0"),
        (["--servers", "1", "--workers", "1", "--slow", "2"], "about the last of several workers"),
        (["--servers", "1", "--workers", "1", "--kill"], "about the last of several workers"),
        (["--servers", "1", "--workers", "1", "--recipes", "dense,powersgd"], "leave powersgd out of --recipes"),
    ],
)
def test_bad_input_is_told(arguments: list[str], told: str) -> None:
    result = CliRunner().invoke(app, ["bench", *arguments])
    assert result.exit_code == 2
    assert told in " ".join(result.output.split())


def test_the_last_trainer_alone_is_slow_and_leaves() -> None:
    job = RowJob(recipe="dense", density=1.0, steps=10, most_steps=10, every=5, trainers=3, slow=10.0, kill=True)
    assert [job.slowness(rank) for rank in range(3)] == [1.0, 1.0, 10.0]
    assert [job.own_steps(rank) < 10 for rank in range(3)] == [False, False, True]


def test_slowness_sleeps_by_what_was_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    clock = iter([1.0, 3.0, 5.0, 5.5])
    monkeypatch.setattr("time.sleep", slept.append)
    monkeypatch.setattr("time.thread_time", lambda: next(clock))
    slowness = Slowness(10.0)
    for _ in range(2):
        with slowness:
            pass
    assert slept == [0.0, 18.0]


def test_the_report_says_what_was_served() -> None:
    results = example()
    served = replace(results.rows[0], served=True)
    results = replace(
        results,
        rows=(*results.rows, served),
        environment={**results.environment, "servers": 1, "slow": 10.0, "kill": True},
    )
    page = html(results)
    assert "and 1 server" in results.title
    assert served.label.endswith(", served")
    assert not served.is_dense
    assert "10 times as long as the others" in page
    assert "DDP would end" in page
    document = results.to_json()["rows"]
    assert [row.get("served") for row in document] == [None] * (len(document) - 1) + [True]
    assert Row.from_json(document[-1]) == served

"""Rows of the bench in outer steps."""

from collections.abc import Iterator
from dataclasses import replace
from statistics import fmean
from typing import Any

import pytest
from typer.testing import CliRunner

from thinwire_lab.bench import options
from thinwire_lab.bench.report import html
from thinwire_lab.bench.results import Results, Row, Setting
from thinwire_lab.bench.rows import Record
from thinwire_lab.bench.worker import handle
from thinwire_lab.cli import app
from thinwire_lab.cluster.local import Cluster
from thinwire_lab.cluster.workers import free_ports

STEPS, H = 6, 3
ROW = {
    "density": 1 / 64,
    "steps": STEPS,
    "most_steps": STEPS,
    "every": H,
    "outer": H,
    "trainers": 2,
    "optimizer": "adamw",
}
USUAL: dict[str, Any] = {
    "workers": None, "link": None, "recipes": None, "densities": "0.01", "steps": 300, "model": "transformer",
    "data": None, "scale": 1.0, "seed": 0, "target": None, "extend": 1.5,
}  # fmt: skip


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--outer", "0"), "numbers of 1 or more"),
        (("--outer", "1.5"), "expected whole numbers"),
        (("--outer", "7"), "--outer 7 does not divide --steps 300"),
        (("--recipes", "dense,diloco"), "diloco takes outer steps: say after how many"),
        (("--recipes", "dense", "--outer", "10"), "no method of --recipes takes outer steps"),
        (("--outer", "10", "--shard", "2"), "leave --shard and --pipeline out"),
        (("--outer", "10", "--pipeline", "2"), "leave --shard and --pipeline out"),
    ],
)
def test_what_cannot_be_done_apart_is_refused(args: tuple[str, ...], message: str) -> None:
    done = CliRunner().invoke(app, ["bench", *args])
    assert done.exit_code == 2
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_every_number_of_inner_steps_is_a_row() -> None:
    asked = options.read(**USUAL, outer="10,30", optimizer="adamw")
    rows = asked.rows()
    assert rows[:2] == [Setting("dense", 1.0), Setting("orthogonal", 0.01 if rows[1].density == 0.01 else 6 / 256)]
    assert [(row.recipe, row.outer) for row in rows[2:]] == [
        (name, every) for name in ("diloco", "streaming_diloco", "muloco", "sparseloco") for every in (10, 30)
    ]
    assert asked.every == 30  # a look between two outer steps would see what was known at the first
    assert options.read(**USUAL, outer="4", optimizer="sgd").every == 20


def _record(outer: int) -> Record:
    record = Record(Setting("diloco", 1.0, outer=outer), 9, 2)
    for step in range(9):
        seconds = 1.0 if step % 3 < 2 else 4.0
        figures = {"total": seconds, "compute": seconds, "encode": 0.0, "exchange": 0.0, "decode": 0.0}
        figures |= {"waited": seconds - 1} if outer else {}
        sent = 0.0 if step % 3 < 2 else 300.0
        record.add({"kind": "step", "step": step, "sent_bytes": sent, "dense_bytes": 200.0, **figures})
    record.add({"kind": "loss", "step": 9, "seconds": 18.0, "bytes": 900, "loss": 3.0})
    record.add({"kind": "done", "different": []})
    return record


def test_a_step_is_a_mean_over_those_from_one_outer_step_to_the_next() -> None:
    row = _record(3).row(dense=None, target=None)
    assert row.step_seconds.p50 == fmean([1.0, 1.0, 4.0])
    assert _record(3).step_seconds() == [2.0, 2.0]  # the first round began before the steps that count
    assert row.wire_bytes_per_step.declared == 100.0
    assert row.label == "diloco, H 3"
    assert row.outer_exchange_seconds == 3.0
    assert _record(9).step_seconds() == [fmean(_record(0).step_seconds())]


def test_a_row_is_read_as_it_was_written() -> None:
    row = _record(3).row(dense=None, target=None)
    document = Results(environment={"complete": True}, rows=(row,)).to_json()
    assert document["rows"][0]["outer"] == 3
    assert Row.from_json(document["rows"][0]) == row
    assert "outer" not in Results(environment={}, rows=(_record(0).row(dense=None, target=None),)).to_json()["rows"][0]


@pytest.fixture(scope="module")
def pair() -> Iterator[Cluster]:
    with Cluster(2, None, f"{handle.__module__}:{handle.__name__}", namespaces=False) as cluster:
        yield cluster


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["diloco", "streaming_diloco", "muloco", "sparseloco"])
def test_workers_train_apart_and_send_at_outer_steps_alone(pair: Cluster, recipe: str) -> None:
    row = ROW | {"recipe": recipe}
    problem = {"name": "transformer", "seed": 0, "data": None, "scale": 1.0}
    events: dict[int, list[dict[str, Any]]] = {0: [], 1: []}
    for rank, event in pair.run({"row": row, "problem": problem}):
        events[rank].append(event)
    losses = [[event["loss"] for event in each if event["kind"] == "loss"] for each in events.values()]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 3
    assert losses[0][-1] < losses[0][0]
    assert events[0][-1]["different"] == []
    sent = [event["sent_bytes"] for event in events[0] if event["kind"] == "step"]
    if recipe != "streaming_diloco":  # whose fragments take turns
        assert [bool(each) for each in sent] == [False, False, True] * 2
    assert sum(sent) < sum(event["dense_bytes"] for event in events[0] if event["kind"] == "step") / 2


@pytest.mark.slow
def test_a_worker_that_is_slow_and_vanishes_does_not_end_the_row(pair: Cluster) -> None:
    row = ROW | {"recipe": "sparseloco", "slow": 2.0, "kill": True, "ports": free_ports(1)}
    problem = {"name": "transformer", "seed": 0, "data": None, "scale": 1.0}
    events = list(pair.run({"row": row, "problem": problem}))
    assert {rank for rank, _ in events} == {0}
    assert sum(event["kind"] == "step" for _, event in events) == STEPS
    waited_for = events[-1][1]["waited_for"]
    assert [len(each) for each in waited_for] == [2, 2]
    assert waited_for[0][0] == 0.0


def test_the_report_says_who_waited_for_whom() -> None:
    rows = (replace(_record(3).row(dense=None, target=None), waited_for=((0.0, 1.26), (3.0, 0.0))),)
    page = html(Results(environment={"kill": True}, rows=rows))
    assert "who waited for whom" in page
    assert "vanishes midway" in page
    assert "DDP would end" not in page  # which has no row
    assert "1.3" in page

"""Islands × shards: FSDP2 within an island, and what crosses between islands is what is declared."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks, mesh_of
from test_report import example
from typer.testing import CliRunner

from thinwire.integrations.sharding.copies import _Copy
from thinwire.integrations.sharding.lane import Coded
from thinwire_lab.bench import options, sharded
from thinwire_lab.bench.methods import BENCHED
from thinwire_lab.bench.options import RowJob
from thinwire_lab.bench.plots import loss_over_bytes
from thinwire_lab.bench.report import html
from thinwire_lab.bench.results import Memory, Process, Results
from thinwire_lab.bench.rows import HEADER_BYTES
from thinwire_lab.cli import app
from thinwire_lab.cluster.link import Meter
from thinwire_lab.cluster.local import Cluster
from thinwire_lab.problems import build

STEPS = 3
JOB = {"steps": STEPS, "most_steps": STEPS, "every": STEPS}


@pytest.fixture(scope="module")
def islands() -> Iterator[Cluster]:
    with Cluster(4, None, "thinwire_lab.bench.worker:handle", island=2) as cluster:
        yield cluster


def _train(cluster: Cluster, **row: Any) -> list[list[dict[str, Any]]]:
    """Train a row and return the events of each rank."""
    events: dict[int, list[dict[str, Any]]] = {}
    problem = {"name": "transformer", "seed": 0, "data": None, "scale": 1.0}
    for rank, event in cluster.run({"row": {**JOB, "density": 1.0, **row}, "problem": problem}):
        events.setdefault(rank, []).append(event)
    return [events[rank] for rank in sorted(events)]


def _losses(events: list[dict[str, Any]]) -> list[float]:
    return [event["loss"] for event in events if event["kind"] == "loss"]


@pytest.mark.slow
def test_islands_train_as_whole_replicas_do_and_their_links_carry_what_is_declared(islands: Cluster) -> None:
    whole = _losses(_train(islands, recipe="dense")[0])
    for events in _train(islands, recipe="dense", shards=2):
        assert _losses(events) == pytest.approx(whole, rel=1e-4)
        assert events[-1]["different"] == []
        step = next(event for event in events if event["kind"] == "step" and event["step"] == STEPS - 1)
        assert step["sent_bytes"] == step["dense_bytes"] == 4 * 834_416
        if "measured" not in step:
            pytest.skip(islands.label)
        tail = events[-3]
        assert tail["kind"] == "tail"
        sent, packets = step["measured"] + tail["measured"], step["packets"] + tail["packets"]
        # what passes within an island, all parameters twice and all gradients, does not count
        assert sent - HEADER_BYTES * packets == pytest.approx(step["sent_bytes"], rel=0.03)


@pytest.mark.slow
@pytest.mark.parametrize(
    "row",
    [
        {"recipe": "topk", "density": 0.01},
        {"recipe": "dgc", "density": 0.01},
        {"recipe": "powersgd"},
        {"recipe": "fading", "density": 0.05, "optimizer": "adamw"},
        {"recipe": "dense", "optimizer": "adamw"},
        {"recipe": "topk", "density": 0.01, "optimizer": "muon"},
    ],
)
def test_any_recipe_keeps_the_shards_of_replicas_identical(islands: Cluster, row: dict[str, Any]) -> None:
    if row.get("optimizer") == "muon" and not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no Muon")
    all_events = _train(islands, shards=2, **row)
    assert all(events[-1]["different"] == [] for events in all_events)
    first, *others = (_losses(events) for events in all_events)
    assert first[-1] < first[0]
    assert all(losses == first for losses in others)


@pytest.fixture(scope="module")
def alone() -> Iterator[Cluster]:
    with Cluster(2, None, "thinwire_lab.bench.worker:handle") as cluster:
        yield cluster


@pytest.mark.slow
def test_without_replicas_links_carry_parameters_twice_and_what_is_declared(alone: Cluster) -> None:
    whole, links = _losses(_train(alone, recipe="dense")[0]), {}
    for row in ({"recipe": "dense"}, {"recipe": "topk", "density": 0.01}):
        events = _train(alone, shards=2, **row)[0]
        assert events[-1]["different"] == []
        step = next(event for event in events if event["kind"] == "step" and event["step"] == STEPS - 1)
        assert step["dense_bytes"] == 2 * 834_416
        if "measured" not in step:
            pytest.skip(alone.label)
        tail = events[-3]
        sent, packets = step["measured"] + tail["measured"], step["packets"] + tail["packets"]
        links[row["recipe"]] = sent - HEADER_BYTES * packets, step["sent_bytes"]
        if row["recipe"] == "dense":
            assert _losses(events) == pytest.approx(whole, rel=1e-4)
    measured, declared = links["topk"]
    assert declared < 0.1 * 2 * 834_416
    assert 2 * 834_416 < measured - declared < 2.1 * 2 * 834_416  # the root is gathered once, as FSDP leaves it whole
    assert links["dense"][0] > measured + 0.9 * 2 * 834_416


@pytest.mark.slow
def test_parameters_travel_as_gathers_say_and_losses_keep_their_digits(alone: Cluster) -> None:
    rows = [
        {"recipe": "fsdp_bf16"},
        *({"recipe": "bf16", "gathers": how} for how in ("none", "lossless", "differences")),
    ]
    found = [_train(alone, shards=2, **row)[0] for row in rows]
    native, plain, coded, _ = losses = [_losses(events) for events in found]
    assert plain == coded
    for each in losses:
        assert each == pytest.approx(native, rel=1e-3)
        assert [float(torch.tensor(loss).bfloat16()) for loss in each] != each
    assert "memory" not in found[0][-1], "FSDP2 alone"
    none, lossless, differences = (events[-1]["memory"]["staging"] for events in found[1:])
    assert none == lossless
    assert differences == none + 2 * 834_416 // 4 * 4, "a copy in bfloat16 on every rank"
    processes = [events[-1]["process"] for events in found]
    tensors = [each["tensors"] for each in processes]
    assert tensors[0] == pytest.approx(3 * 4 * 834_416 / 2, rel=0.02), "parameters, gradients and momentum"
    assert tensors[1] == pytest.approx(tensors[0] + none, rel=0.02)
    assert tensors[3] == pytest.approx(tensors[0] + differences, rel=0.02)
    assert all(each["peak"] >= each["resident"] > each["tensors"] for each in processes)
    step = [next(e for e in events if e["kind"] == "step" and e["step"] == STEPS - 1) for events in found]
    if "measured" in step[0]:
        sent = [each["measured"] for each in step]
        assert sent[0] > sent[1] > 1.1 * sent[2] > 1.4 * sent[3]


KINDS = {"differences2": _Copy, "lossless": Coded}


def _spoilt(gathers: str) -> list[list[str]]:
    """Return what differs before and after one rank gathers something else."""
    job = RowJob(recipe="bf16", density=1.0, steps=1, most_steps=1, every=1, shards=2, gathers=gathers)
    kind: Any = KINDS[gathers]
    found: list[list[str]] = []
    bring = kind._bring

    def spoilt(self: Any, rows: torch.Tensor, *args: Any) -> None:
        bring(self, rows, *args)
        rows.add_(1)

    whole = mesh_of(1, dist.get_world_size(), names=("replicate", "shard"))
    for how in (bring, spoilt if dist.get_rank() else bring):
        with mock.patch.object(sharded, "mesh", return_value=whole):
            run = sharded.Sharded(job, build("transformer", seed=0, scale=0.1), Meter())
        run.step(0)
        with mock.patch.object(kind, "_bring", how):
            found.append(run.differing())
    return found


def _counted() -> tuple[float, float]:
    """Return what was measured of a step after an evaluation, on a link that counts nothing, and the meter's total."""
    job = RowJob(recipe="bf16", density=1.0, steps=1, most_steps=1, every=1, shards=2, gathers="differences")
    whole, meter = mesh_of(1, dist.get_world_size(), names=("replicate", "shard")), Meter(wire=lambda: (0, 0))
    with mock.patch.object(sharded, "mesh", return_value=whole):
        run = sharded.Sharded(job, build("transformer", seed=0, scale=0.1), meter)
    run.held_out_loss()
    return run.step(0)["measured"], meter.total


def test_what_an_evaluation_gathers_for_a_step_is_in_its_total_too(ranks: Ranks) -> None:
    for measured, total in ranks.run(2, _counted):
        assert measured == total > 0


@pytest.mark.parametrize("gathers", KINDS)
@pytest.mark.first(1)
def test_a_rank_that_gathers_something_else_is_told(ranks: Ranks, gathers: str) -> None:
    for before, after in ranks.run(2, _spoilt, gathers):
        assert not before
        assert after


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--gathers", "none", "--shard", "2", "--workers", "4"), "give --shard 4 as well"),
        (("--gathers", "few", "--shard", "2", "--workers", "2"), "--gathers 'few'; expected some of none, lossless"),
        (("--recipes", "fsdp_bf16", "--shard", "2", "--workers", "4"), "fsdp_bf16 shards over all workers"),
        (("--shard", "1"), "--shard is 1; expected 2 or more"),
        (("--shard", "0"), "--shard is 0; expected 2 or more"),
        (("--shard", "2", "--workers", "5"), "give --workers 4, another multiple of 2"),
        (("--shard", "4", "--workers", "4", "--recipes", "dense,dgc"), "dgc needs replicas of the shards"),
        (("--shard", "2", "--pipeline", "2", "--workers", "4"), "give one of the two"),
        (
            ("--shard", "2", "--recipes", "dense,torch_powersgd"),
            "torch_powersgd works in DistributedDataParallel alone",
        ),
        (("--shard", "2", "--recipes", "auto"), "auto works in DistributedDataParallel alone"),
        (("--shard", "2", "--recipes", "topk", "--model", "lstm_sparse", "--data", "."), "cannot shard the sparse"),
        (("--shard", "2", "--optimizer", "adamw", "--recipes", "dgc"), "dgc takes over SGD's momentum"),
    ],
)
def test_what_cannot_be_sharded_is_refused(args: tuple[str, ...], message: str) -> None:
    done = CliRunner().invoke(app, ["bench", *args])
    assert done.exit_code == 2
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_who_names_no_recipes_gets_those_that_work_on_shards() -> None:
    usual: dict[str, Any] = {
        "workers": None, "link": None, "recipes": None, "densities": "0.01", "steps": 300, "model": "transformer",
        "data": None, "scale": 1.0, "seed": 0, "target": None, "extend": 1.5, "shard": 2,
    }  # fmt: skip
    sgd, adamw = options.read(**usual), options.read(**usual | {"optimizer": "adamw"})
    assert (sgd.workers, sgd.island, sgd.then) == (4, 2, None)
    assert set(sgd.recipes) == {"dense", "topk", "dgc", "powersgd"}
    assert (set(adamw.recipes), adamw.left_out) == ({"dense", "topk", "powersgd", "fading"}, ("dgc",))
    assert all(BENCHED[name].install_sharded for name in (*sgd.recipes, *adamw.recipes))


def test_a_report_says_whose_bytes_they_are() -> None:
    results = example()
    process = Process(tensors=5_000_000, resident=600_000_000, peak=None)
    first = replace(results.rows[0], memory=Memory(waiting=3000, staging=40_000, scratch=0), process=process)
    results = replace(results, environment={**results.environment, "shard": 2}, rows=(first, *results.rows[1:]))
    page, written = html(results), results.to_json()
    assert "40.0 kB" in page
    assert "3.00 kB" in page
    assert "5.00 MB" in page
    assert "600 MB" in page
    assert Results.from_json(written).rows[0].process == process
    assert written["rows"][0]["memory"] == {"waiting": 3000, "staging": 40_000, "scratch": 0}
    assert "memory" not in written["rows"][1]
    assert "in islands of 2" in results.title
    assert "sent per step per island" in page
    assert "2 shards: bytes are what crosses between islands. dense: FSDP2" in page
    assert "per island" in loss_over_bytes(results).axes[0].get_xlabel()
    assert "per worker" in loss_over_bytes(example()).axes[0].get_xlabel()

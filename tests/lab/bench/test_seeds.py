"""Several seeds a row: what is a mean, what is a median, and that one seed leaves everything as it was."""

import io
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import pytest
from rich.console import Console
from test_report import example, row

from thinwire_lab.bench import plots
from thinwire_lab.bench.options import read
from thinwire_lab.bench.report import html, in_words, print_report
from thinwire_lab.bench.results import Results, Row
from thinwire_lab.bench.rows import merged
from thinwire_lab.bench.session import Session
from thinwire_lab.cluster.workers import Workers
from thinwire_lab.show.progress import BenchProgress

PARTS = (0.1, 0.0, 0.1, 0.0)
SEEDS = (4, 5, 6)


def _runs(*losses: float, recipe: str = "topk", step: float = 0.2) -> list[Row]:
    """Rows that differ in loss, and in how long a step took: step, 1.1 step, 3 step."""
    return [
        replace(row(recipe, 0.01, scale * step, PARTS, 1000.0 * scale, loss), seconds_to_target=scale)
        for loss, scale in zip(losses, (1.0, 1.1, 3.0), strict=True)
    ]


def _results() -> Results:
    rows = (
        merged(_runs(2.0, 2.1, 2.3, recipe="dense"), SEEDS, dense=None),
        merged(_runs(2.1, 2.2, 2.6), SEEDS, dense=None),
    )
    return replace(example(seeds=list(SEEDS)), rows=rows)


def test_losses_are_means_and_times_and_bytes_medians() -> None:
    dense = row("dense", 1.0, 0.44, PARTS, 1000.0, 2.0)
    found = merged(_runs(2.0, 2.1, 2.3), SEEDS, dense=dense)
    assert found.final_loss == pytest.approx(6.4 / 3)
    assert found.step_seconds.p50 == pytest.approx(0.22)
    assert found.wire_bytes_per_step.declared == pytest.approx(1100.0)
    assert found.seconds_to_target == 1.1
    assert found.speedup_vs_dense == pytest.approx(2.0)
    assert found.loss_curve[-1] == pytest.approx((0.22 * 300, 1100.0 * 300, 6.4 / 3))
    spread = found.spread
    assert spread is not None
    assert (spread.seeds, spread.final_loss) == (SEEDS, (2.0, 2.1, 2.3))
    assert spread.loss_deviation == pytest.approx(math.sqrt((0.4**2 + 0.1**2 + 0.5**2) / 9 / 2))
    assert spread.curve_deviation[-1] == pytest.approx(spread.loss_deviation)


def test_a_target_counts_if_more_than_half_the_runs_got_there() -> None:
    first, second, third = _runs(2.0, 2.1, 2.3)
    lost = [replace(each, seconds_to_target=None) for each in (second, third)]
    assert merged([first, second, lost[1]], SEEDS, dense=None).seconds_to_target == 1.1
    assert merged([first, *lost], SEEDS, dense=None).seconds_to_target is None


def test_a_run_that_diverged_or_came_apart_shows() -> None:
    first, second, third = _runs(2.0, 2.1, math.nan)
    found = merged([first, replace(second, replicas_identical=False), third], SEEDS, dense=None)
    assert math.isnan(found.final_loss)
    assert not found.replicas_identical


def test_of_curves_the_points_count_that_all_have() -> None:
    long, short, other = _runs(2.0, 2.1, 2.3)
    found = merged([long, replace(short, loss_curve=short.loss_curve[:5]), other], SEEDS, dense=None)
    assert len(found.loss_curve) == 5
    assert found.spread is not None
    assert len(found.spread.curve_deviation) == 5


def test_the_document_has_the_spread_and_survives_a_round_trip() -> None:
    assert Results.from_json(json.loads(json.dumps(_results().to_json()))) == _results()
    assert "spread" in _results().to_json()["rows"][0]
    assert "spread" not in example().to_json()["rows"][0]


def test_table_words_page_and_plots_have_the_spread() -> None:
    out = io.StringIO()
    print_report(Console(file=out, width=200), _results())
    assert "2.133 ± 0.153" in out.getvalue()
    assert "mean ± standard deviation over 3 seeds" in out.getvalue()
    assert "means of 3 seeds, with standard deviations up to 0.265" in in_words(_results())[1]
    assert "2.133 ± 0.153" in html(_results())
    assert len(plots.loss_over_seconds(_results()).axes[0].collections) == 2
    assert not plots.loss_over_seconds(example()).axes[0].collections


class _Workers:
    """Stands in for workers: dense ends at the loss 2 + seed, and topk at a tenth more."""

    label, throttled, start = "nowhere", False, 2.0

    def __init__(self) -> None:
        self.jobs: list[dict[str, Any]] = []

    def run(self, job: dict[str, Any]) -> Iterator[tuple[int, dict[str, Any]]]:
        self.jobs.append(job)
        dense, steps = job["row"]["recipe"] == "dense", job["row"]["steps"]
        loss = self.start + job["problem"]["seed"] + (0 if dense else 0.1)
        times = {"compute": 0.1, "encode": 0.0, "exchange": 0.1, "decode": 0.0, "total": 0.2}
        for step in range(steps):
            yield 0, {"kind": "step", "step": step, "sent_bytes": 1.0, "dense_bytes": 1.0, **times}
        yield 0, {"kind": "loss", "step": steps, "seconds": 1.0, "bytes": 1.0, "loss": loss}
        yield 0, {"kind": "done", "different": []}


class _Watcher:
    def __init__(self) -> None:
        self.started: list[str] = []
        self.finished: list[str] = []

    def start_row(self, label: str, steps: int) -> None:
        self.started.append(label)

    def advance(self, step: int, loss: float | None, step_seconds: float) -> None:
        pass

    def finish_row(self, summary: str) -> None:
        self.finished.append(summary)


def _session(**changes: Any) -> tuple[Results, _Workers, _Watcher]:
    asked: dict[str, Any] = {"workers": 2, "link": "none", "recipes": "topk,dense", "densities": "0.01", "steps": 8}
    asked |= {"model": "transformer", "data": None, "scale": 1.0, "seed": 4, "target": None, "extend": 1.0}
    session, workers, watcher = Session(read(**asked | changes), "a model"), _Workers(), _Watcher()
    session.run(cast(Workers, workers), cast(BenchProgress, watcher), lambda: None)
    return session.results(), workers, watcher


def test_each_row_is_trained_with_each_seed_towards_denses_loss_of_that_seed() -> None:
    results, workers, watcher = _session(seeds=3)
    assert [(job["row"]["recipe"], job["problem"]["seed"], job["row"]["target"]) for job in workers.jobs] == [
        *(("dense", seed, None) for seed in SEEDS),
        *(("topk", seed, 2.0 + seed) for seed in SEEDS),
    ]
    assert watcher.started[:2] == ["dense, seed 4", "dense, seed 5"]
    assert [row.final_loss for row in results.rows] == pytest.approx([7.0, 7.1])
    assert results.target_loss == pytest.approx(7.0)
    assert results.environment["seeds"] == [4, 5, 6]
    assert results.environment["complete"]


def test_one_seed_is_as_it_was() -> None:
    results, workers, watcher = _session()
    assert [(job["row"]["recipe"], job["problem"]["seed"], job["row"]["target"]) for job in workers.jobs] == [
        ("dense", 4, None),
        ("topk", 4, 6.0),
    ]
    assert watcher.started == ["dense", "topk 0.01"]
    assert all(row.spread is None for row in results.rows)
    assert "seeds" not in results.environment
    assert "left_out" not in results.environment


def test_a_log_says_that_a_row_diverged(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _session()[2].finished == ["200 ms per step, loss 6.000", "200 ms per step, loss 6.100"]
    monkeypatch.setattr(_Workers, "start", math.nan)
    assert _session(recipes="dense")[2].finished == ["200 ms per step, loss diverged"]


def test_workers_are_told_the_optimizer_and_the_report_names_it() -> None:
    results, workers, _ = _session(optimizer="adamw")
    assert {job["row"]["optimizer"] for job in workers.jobs} == {"adamw"}
    assert (results.environment["optimizer"], results.environment["learning_rate"]) == ("adamw", 2e-3)
    assert results.title.startswith("transformer with adamw · 2 workers")
    assert _session()[0].title.startswith("transformer · 2 workers")


def test_what_an_optimizer_cannot_train_with_is_left_out_of_the_default_and_that_is_said() -> None:
    results, _, _ = _session(optimizer="adamw", recipes=None)
    assert [row.recipe for row in results.rows] == ["dense", "torch_bf16", "bf16", "torch_powersgd", "topk"]
    out = io.StringIO()
    print_report(Console(file=out, width=200), results)
    assert "Left out: dgc and dragonn, which take over SGD's momentum; --optimizer is adamw." in out.getvalue()
    assert [row.recipe for row in _session(recipes=None)[0].rows][-2:] == ["dgc", "dragonn"]

"""The program that measures errors and judges the papers' claims, on gradients drawn at random."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from rich.progress import Progress

from thinwire_lab.papers.dragonn.claims import by_prefix_sum
from thinwire_lab.papers.fft.offset_float import ieee_error, uniform_error
from thinwire_lab.papers.gradients import QUICK_STEPS, analyse, train
from thinwire_lab.papers.gtopk.claims import Outcome, exchanged, pick
from thinwire_lab.papers.registry import PAPERS
from thinwire_lab.papers.shared.claims import FFT_PAPER, UNTESTABLE, Verdict, judge
from thinwire_lab.papers.shared.errors import Measured, compressors, measure
from thinwire_lab.papers.shared.ledger import FAILS, HOLDS
from thinwire_lab.papers.shared.material import Gradients, Material, Run, Snapshot, error
from thinwire_lab.papers.shared.recording import alphas

SLOW = {"D13", "D14", "D21", "T27"}
CHECKS = {name: check for paper in PAPERS for name, check in paper.checks.items()}


@pytest.fixture(scope="module")
def run() -> Run:
    """Return two snapshots, heavy-tailed, neighbours in a row alike."""
    generator = torch.Generator().manual_seed(0)
    shots = [Snapshot(step=step, workers=[_draw(generator) for _ in range(4)]) for step in (2, 9)]
    made = Run(model="synthetic", snapshots=shots)
    made.alphas = [alpha for shot in shots for alpha in alphas(shot.step, shot.workers)]
    made.thresholds = {"weight": [1.0 + 0.01 * (step % 3) for step in range(40)]}
    return made


def _draw(generator: torch.Generator) -> Gradients:
    rows = torch.randn(48, 1, generator=generator) * torch.randn(48, 64, generator=generator) * 0.01
    return {"weight": rows, "bias": torch.randn(48, generator=generator) * 0.01}


@pytest.fixture(scope="module")
def rows(run: Run) -> list[Measured]:
    return list(measure(run, list(compressors(quick=True)), lambda: None))


@pytest.fixture(scope="module")
def verdicts(run: Run) -> dict[str, Verdict]:
    fast = {name: check for name, check in CHECKS.items() if name not in SLOW}
    return {verdict.id: verdict for verdict in judge(fast, Material(runs=[run], quick=True))}


def test_every_method_gives_a_row_for_each_snapshot_with_real_bytes(rows: list[Measured], run: Run) -> None:
    assert len(rows) == 2 * len(list(compressors(quick=True)))
    assert all(row.bytes > 0 and row.error >= 0 and -1 <= row.cosine <= 1 + 1e-9 for row in rows)
    topk = next(row for row in rows if row.method == "topk" and row.density == 0.1)
    expected = 0
    for d in (g.numel() for g in run.late.mean.values()):
        k = round(0.1 * d)  # of 10 elements, one: 3 low bits each
        expected += 16 + sum(-(-bits // 64) * 8 for bits in (32 * k, 3 * k, k + (d - 1) // 8))
    assert topk.bytes == expected


def test_more_bytes_mean_less_error_for_the_same_method(rows: list[Measured]) -> None:
    for family in ("topk", "fft", "qsgd", "powersgd"):
        curve = sorted(
            (row.bits_per_element, row.error) for row in rows if row.method.split()[0] == family and row.step == 9
        )
        assert [e for _, e in curve] == sorted((e for _, e in curve), reverse=True), family


@pytest.mark.slow
def test_arithmetic_claims_come_out_as_calculated_by_hand(verdicts: dict[str, Verdict]) -> None:
    holds = {"D5", "D7", "D25", "F5", "F8", "F9", "F10", "F26", "S1", "S2", "G9", "G10"}
    fails = {"D24", "F11", "F21", "S5", "S6", "S16", "T25", "G12", "G17", "G21"}
    assert {name for name in holds if verdicts[name].verdict != HOLDS} == set()
    assert {name for name in fails if verdicts[name].verdict != FAILS} == set()


@pytest.mark.slow
def test_a_claim_without_its_data_is_not_testable(verdicts: dict[str, Verdict]) -> None:
    for name in ("D23", "F17", "S7", "T17", "T24"):
        assert verdicts[name].verdict == UNTESTABLE
        assert "needs" in verdicts[name].how


def test_without_gradients_nothing_is_judged_from_them() -> None:
    chosen = {name: CHECKS[name] for name in ("F14", "F8")}
    found = {verdict.id: verdict.verdict for verdict in judge(chosen, Material(runs=[]))}
    assert found == {"F14": UNTESTABLE, "F8": HOLDS}


@pytest.fixture(scope="module")
def trees() -> list[Outcome]:
    # 5 and 1 meet in one half and 1 is dropped; the other half brings index 1 back.
    vectors = [[5.0, 0, 0], [0, 1.0, 0], [0, 9.0, 0], [0, 0, 0.5]]
    picks = [pick(torch.tensor(x), 1 / 3) for x in vectors]
    parts = [torch.randn(64, generator=torch.Generator().manual_seed(seed)) for seed in range(8)]
    several = [exchanged([pick(x, 0.1) for x in parts[:ranks]]) for ranks in (1, 2, 3, 5, 8)]
    return [exchanged(picks, "paper"), exchanged(picks), *several]


@pytest.mark.slow
def test_the_tree_loses_by_the_papers_rule_what_the_exact_rule_keeps(trees: list[Outcome]) -> None:
    paper, exact, *_ = trees
    assert (paper.total.indices.tolist(), paper.total.values.tolist()) == ([1], [9])
    assert math.isclose(paper.lost, 1 / 15.5, rel_tol=1e-6)
    assert exact.lost == 0


@pytest.mark.slow
def test_the_tree_takes_any_number_of_workers(trees: list[Outcome]) -> None:
    for tree in trees[2:]:
        assert len(tree.total.indices) == 6
        assert tree.lost < 1e-6


def test_the_prefix_sum_finds_what_passes() -> None:
    found, counts = by_prefix_sum([0.0, 3.0, 1.0, 2.0], 2.0)
    assert found == [1, 3]
    assert counts == {"compare": 8, "add": 6, "swap": 3}


def test_grids_keep_the_numbers_on_them() -> None:
    assert uniform_error(torch.tensor([-7.0, 0.0, 3.0, 7.0]), 4) < 1e-12
    assert ieee_error(torch.tensor([0.5, -1.0, 2.0, 0.0]), 6) == 0


def test_error_is_relative_and_squared() -> None:
    assert error(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 0.0])) == pytest.approx(16 / 25)


@pytest.mark.slow
def test_a_report_is_a_document(run: Run) -> None:
    chosen = {name: FFT_PAPER.checks[name] for name in ("F8", "F14")}
    with Progress(disable=True) as progress:
        material, papers = Material(runs=[run], quick=True), [replace(FFT_PAPER, checks=chosen)]
        document = json.loads(json.dumps(analyse(material, QUICK_STEPS, progress, papers), allow_nan=False))
    assert document["schema"] == "thinwire.fidelity/1"
    assert set(document["errors"][0]) == {
        "model", "step", "method", "density", "bytes", "bits_per_element", "error", "cosine",
    }  # fmt: skip
    assert set(document["claims"][0]) == {"id", "claim", "verdict", "figure", "how"}


def test_missing_data_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    material, console = Material(runs=[], quick=True, data=tmp_path), Console(width=200)
    with Progress(console=console, disable=True) as progress:
        train(material, QUICK_STEPS, console, progress)
    assert material.runs == []
    said = capsys.readouterr().out
    assert "skipping lstm" in said
    assert "skipping resnet20" in said

"""DCT-MP's judges: what they say of runs made by hand, and which comparisons count as complete."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from thinwire_lab.machine import TODAY
from thinwire_lab.papers.dct.crossing import Boundaries, Losses
from thinwire_lab.papers.dct.rows import rows
from thinwire_lab.papers.dct.training import Document, Run
from thinwire_lab.papers.registry import PAPERS
from thinwire_lab.papers.shared.ledger import DEPENDS, FAILS, HOLDS, UNDECIDED, Outcome
from thinwire_lab.papers.shared.material import Absent
from thinwire_lab.papers.shared.shelf import Shelf

(DCT,) = (paper for paper in PAPERS if paper.name == "dct")
NOISE = (-0.001, 0.0, 0.001)


def _run(row: str, seed: int, loss: float) -> Run:
    return Run(
        problem="dlrm", row=row, seed=seed, density=0.1, train_loss=loss - 0.1, held_out_loss=loss, train_accuracy=0.5,
        held_out_accuracy=0.5, kept=0.1, nonzero=0.1, kept_late=0.1, kept_held_out=0.1, diverged_at=None, seconds=1.0,
    )  # fmt: skip


def _losses(problem: str, above: Mapping[str, float]) -> Losses:
    """Three seeds of each row: 1 and the baseline's noise, times what `above` says of rows that begin so."""
    found = {}
    for row in rows(problem):
        factor = next((1 + more for start, more in above.items() if row.name.startswith(start)), 1.0)
        found[row.name] = [_run(row.name, seed, (1 + noise) * factor) for seed, noise in enumerate(NOISE)]
    return Losses(runs=found)


def _verdict(claim: str, *found: Any) -> str:
    return DCT.judges[claim].decide(*found).verdict


def test_no_loss_anywhere_is_judged_claim_by_claim() -> None:
    dlrm, text = _losses("dlrm", {}), _losses("transformer", {})
    words = {claim: _verdict(claim, dlrm, text) for claim in ("T8", "T9", "T10", "T19", "T22", "T23", "T26")}
    # nothing is worse, so what should be worse is not, and what should be as good is
    assert words == {"T8": FAILS, "T9": FAILS, "T10": FAILS, "T19": HOLDS, "T22": FAILS, "T23": FAILS, "T26": FAILS}
    assert _verdict("T13", text) == HOLDS


def test_the_papers_losses_make_its_claims_hold() -> None:
    above = {"exact | 98%": 0.05, "exact | 95% | 3": 0.05, "exact | 75% | 5": 0.05, "exact | 75% | 3 workers +": 0.05}
    above |= {"Gaussian sketch": 0.2, "gradient top-k": 0.2}
    dlrm, text = _losses("dlrm", above), _losses("transformer", above)
    assert {_verdict(claim, dlrm, text) for claim in ("T8", "T9", "T10", "T22", "T23")} == {HOLDS}
    assert _verdict("T8", dlrm, _losses("transformer", {})) == DEPENDS
    worse_before = {"exact": 0.05}
    assert {_verdict(c, _losses("dlrm", worse_before), _losses("transformer", worse_before)) for c in ("T8", "T9")} == {
        FAILS
    }


def test_seeds_that_disagree_decide_nothing() -> None:
    noisy = _losses("dlrm", {})
    wide = [_run("x", seed, 1 + off) for seed, off in enumerate((-0.05, 0.0, 0.05))]
    apart = Losses(runs={**noisy.runs, **{name: wide for name in noisy.runs if name.startswith("exact")}})
    assert {_verdict(claim, apart, apart) for claim in ("T8", "T9")} == {UNDECIDED}


def test_better_than_dense_on_one_model_alone_depends() -> None:
    better = {"exact": -0.05}
    assert _verdict("T26", _losses("dlrm", better), _losses("transformer", better)) == HOLDS
    assert _verdict("T26", _losses("dlrm", better), _losses("transformer", {})) == DEPENDS
    assert _verdict("T26", _losses("dlrm", {}), _losses("transformer", {})) == FAILS


def test_both_at_once_is_judged_seed_by_seed() -> None:
    def found(factor: float) -> dict[str, Any]:
        losses = [2.0 + noise for noise in NOISE]
        return {"runs": {"neither": _events(losses), "both": _events([factor * loss for loss in losses])}}

    good, bad = found(0.995), found(1.05)
    given = ((good, good, bad), (bad, good, bad), (good, good, good), (good, bad, bad))
    assert [_verdict("T12", *each) for each in given] == [HOLDS, FAILS, FAILS, HOLDS]


def _events(losses: list[float]) -> list[dict[str, float]]:
    return [{"loss": loss} for loss in losses]


def test_a_comparison_that_lacks_a_seed_of_a_row_is_missing(tmp_path: Path) -> None:
    evidence, shelf = Boundaries(problem="dlrm"), Shelf(folder=tmp_path)
    (command,) = evidence.commands
    assert "--resume" in command
    assert evidence.missing(shelf) == (command,)
    document = Document(environment={}, settings={"dlrm": {}})
    for row in rows("dlrm"):
        for seed in evidence.seeds:
            document.add(_run(row.name, seed, 1.0))
    path = tmp_path / "boundaries-dlrm.json"
    document.write(path)
    (tmp_path / "made.json").write_text(json.dumps({command: {"thinwire": TODAY}}))
    assert evidence.missing(shelf) == ()
    assert math.isclose(evidence.read(shelf).over("exact | 75% | 2 workers").mean, 0)
    document.runs.pop(("dlrm", rows("dlrm")[3].name, 1))
    document.write(path)
    with pytest.raises(Absent, match="9 of 10 seeds"):
        evidence.read(shelf)
    assert evidence.missing(shelf) == (command,)


def test_a_comparison_of_some_rows_waits_for_these_and_dense_alone(tmp_path: Path) -> None:
    row = "exact | 90% | 3 workers"
    evidence, shelf = Boundaries(problem="dlrm", only=(row,)), Shelf(folder=tmp_path)
    (command,) = evidence.commands
    assert f'--only "{row}"' in command
    document = Document(environment={}, settings={"dlrm": {}})
    for seed in evidence.seeds:
        document.add(_run(row, seed, 1.1))
    document.write(tmp_path / "boundaries-dlrm.json")
    with pytest.raises(Absent, match="baseline"):
        evidence.read(shelf)
    for seed in evidence.seeds:
        document.add(_run("baseline | 0% | none", seed, 1.0))
    document.write(tmp_path / "boundaries-dlrm.json")
    assert math.isclose(evidence.read(shelf).over(row).mean, 10)


LINES = ("plain", "DCT-MP 75 %", "DCT-MP 90 %", "DCT-MP 95 %", "DCT-DP", "both", "plain again")


def _steps(*times: float) -> dict[str, Any]:
    rounds = {name: [{"total": time}] * 3 for name, time in zip(LINES, times, strict=True)}
    return {"runs": {"dlrm": {"100mbit": rounds}}}


def test_step_times_that_flatten_and_add_up() -> None:
    assert _verdict("T14", _steps(1, 0.9, 0.8, 0.79, 0.7, 0.5, 1)) == HOLDS
    assert _verdict("T14", _steps(1, 0.9, 0.8, 0.6, 0.7, 0.5, 1)) == FAILS  # falls on
    assert _verdict("T14", _steps(1, 1.1, 1.1, 1.1, 0.7, 0.5, 1)) == FAILS  # gains nothing
    assert _verdict("T15", _steps(1, 0.9, 0.8, 0.79, 0.7, 0.5, 1)) == HOLDS
    assert _verdict("T15", _steps(1, 0.9, 0.8, 0.79, 0.5, 0.6, 1)) == FAILS


def test_rounds_that_disagree_decide_nothing() -> None:
    found = _steps(1, 0.9, 0.8, 0.79, 0.7, 0.5, 1)
    lines = found["runs"]["dlrm"]["100mbit"]
    lines["DCT-MP 90 %"][0] = {"total": 1.2}
    lines["both"] = [{"total": 0.5}, {"total": 0.5}, {"total": 0.9}]
    assert [_verdict(claim, found) for claim in ("T14", "T15")] == [UNDECIDED] * 2


def _look(thresholds: float, *, zeros: float = 0.5, passed: float = 0.2) -> dict[str, Any]:
    return {
        "rms": 2.0, "zeros": zeros, "kept": passed, "thresholds": [0.0, thresholds, thresholds],
        "fitted": [passed] * 3, "one_sided": [passed] * 3,
    }  # fmt: skip


CHECKED = {name: Outcome(verdict=HOLDS, measured="", how="") for name in ("T17", "T18", "T24")}


def _followed(end: float, **look: float) -> dict[str, Any]:
    runs = {
        name: [_look(2.0), _look(end, **look)] for name in ("exact 0.25", "exact 0.1", "exact 0.05", "Laplace 0.25")
    }
    aic = {"before the ReLU": {"aic": {"Laplace": 1.0, "normal": 1.1}}, "at the cut": {"zeros": 0.8}}
    return {"runs": {**runs, "dense": [_look(2.0), _look(2.0, **look)]}, "shapes": aic}


def test_activations_are_judged_at_the_end_of_the_training() -> None:
    assert _verdict("T16", _followed(1.0)) == HOLDS
    assert _verdict("T16", _followed(3.0)) == FAILS
    assert _verdict("T17", _followed(1.0), CHECKED) == HOLDS
    assert _verdict("T18", _followed(1.0, passed=0.1), CHECKED) == HOLDS
    assert _verdict("T18", _followed(1.0, passed=0.19), CHECKED) == DEPENDS
    assert _verdict("T24", _followed(1.0, zeros=0.6), CHECKED) == HOLDS
    assert _verdict("T24", _followed(1.0, zeros=0.8), CHECKED) == DEPENDS


def test_seeds_that_disagree_leave_a_claim_on_activations_undecided() -> None:
    assert _verdict("T16", _followed(1.0), _followed(3.0)) == UNDECIDED
    assert _verdict("T18", _followed(1.0, passed=0.1), _followed(1.0, passed=0.19), CHECKED) == UNDECIDED
    assert _verdict("T24", _followed(1.0, zeros=0.6), _followed(1.0, zeros=0.8), CHECKED) == UNDECIDED

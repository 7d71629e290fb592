"""thinwire_lab.studies.planner: what a cell comes to, its figures, and a short run of it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from thinwire_lab.studies import planner
from thinwire_lab.studies.planner import Cell, summary

PROGRAM = [sys.executable, "-m", "thinwire_lab.studies.planner"]
MEASURED = {
    "dense": [1.0, 1.0, 2.0],
    "topk:0.01": [0.4, 0.5, 0.6],
    "the plan": [0.6],
    "auto": [1.1, 0.9, 2.02],
    "dense again": [1.0, 1.1, 2.0],
}


def _cell(link: str = "1gbit") -> Cell:
    return Cell(
        model="transformer",
        workers=2,
        link=link,
        predicted={"dense": 1.1, "topk:0.01": 0.5, "the plan": 0.45},
        measured=MEASURED,
        planning=4.0,
        attaching=3.0,
        deciding=2.0,
        choice={"w": "topk:0.01"},
        reason="first plan",
        same=True,
    )


def test_a_cell_by_hand() -> None:
    found = _cell()
    assert found.candidates == ["dense", "topk:0.01"]
    assert found.best == "topk:0.01"
    assert found.error("dense") == pytest.approx(0.1)
    assert found.regret("the plan") == pytest.approx(0.2)
    assert found.over_dense("auto") == pytest.approx(0.01)
    assert found.over_dense("dense again") == 0.0


def test_the_summary_by_hand() -> None:
    found = summary([_cell(), _cell("none")])
    assert found["predictions"] == 6
    assert found["median_error"] == pytest.approx(0.1)
    assert found["median_regret"] == pytest.approx(0.2)
    assert found["auto_over_dense_most"] == pytest.approx(0.01)


@pytest.mark.slow
def test_a_short_run_measures_what_it_predicts(tmp_path: Path) -> None:
    command = [*PROGRAM, "grid", "--models", "transformer", "--worlds", "2"]
    command += ["--links", "1gbit", "--seconds", "0.1", "--json", str(tmp_path / "grid.json")]
    found = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"COLUMNS": "100"})
    if "cannot be limited here" in found.stderr:
        pytest.skip("no network namespaces here")
    assert found.returncode == 0, found.stderr
    assert "median error" in found.stdout
    raw = json.loads((tmp_path / "grid.json").read_text())
    (only,) = raw["cells"]
    assert only["same"] is True
    assert set(only["predicted"]) | {"auto", "dense again"} == set(only["measured"])


@pytest.mark.slow
def test_a_model_that_is_unknown_is_refused() -> None:
    command = [*PROGRAM, "grid", "--models", "nonsense"]
    found = subprocess.run(command, capture_output=True, text=True)
    assert found.returncode == 2
    assert "nonsense" in found.stderr


def test_without_the_data_of_the_only_model_it_says_so() -> None:
    with pytest.raises(typer.BadParameter, match="resnet20 needs --data"):
        planner.grid(models="resnet20")

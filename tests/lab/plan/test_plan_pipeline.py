"""`thinwire plan --pipeline` as a user meets it."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from thinwire.pipeline import TopKBoundary
from thinwire_lab.cli import app


def _measured(tmp_path: Path, *args: str) -> tuple[str, dict[str, Any], str]:
    """Run the command and return what it printed, its JSON and its page."""
    json_path, html_path = tmp_path / "o.json", tmp_path / "o.html"
    files = ["--json", str(json_path), "--html", str(html_path)]
    done = CliRunner().invoke(app, ["plan", "--model", "dlrm", *args, *files], env={"COLUMNS": "100"})
    assert done.exit_code == 0, (done.output, done.exception)
    return re.sub(r"\s+", " ", done.stdout), json.loads(json_path.read_text()), html_path.read_text()


@pytest.mark.slow
def test_one_replica_of_two_stages_on_a_slow_link(tmp_path: Path) -> None:
    said, document, page = _measured(tmp_path, "--pipeline", "2", "--workers", "2", "--link", "2mbit")
    assert "1 replica of 2 stages, 2 workers · " in said
    assert "4 micro-batches a step" in said
    assert "Stage 0 has only one replica: no gradients to exchange." in said
    assert "Stage 1 has one replica" in said
    (row,) = document["boundaries"]
    width = 256
    assert row["cut"]["dense_bytes"] % (4 * width) == 0
    shape = torch.Size((row["cut"]["dense_bytes"] // 4 // width, width))
    assert row["cut"]["nbytes"] == TopKBoundary(0.05, values=torch.bfloat16).nbytes(shape)
    assert "stage 0 to 1 " in said
    assert row["choice"] in said
    assert row["reason"] in said
    assert row["reason"] in page
    assert re.search(r"pays below [\d.]+ [GM]bit/s here", said)
    assert "http" not in page


@pytest.mark.slow
def test_two_replicas_of_two_stages_plan_their_gradients_too(tmp_path: Path) -> None:
    args = ["--pipeline", "2", "--workers", "4", "--link", "none", "--candidates", "bf16"]
    said, document, page = _measured(tmp_path, *args, "--boundary", "0.1", "--micro-batches", "2")
    assert "2 replicas of 2 stages, 4 workers · unthrottled" in said
    assert document["micro_batches"] == 2
    assert document["density"] == 0.1
    assert len(document["boundaries"]) == 1
    for stage, own in enumerate(document["stages"]):
        heading = f"Stage {stage}, gradients between its 2 replicas:"
        assert heading in said
        assert heading in page
        assert own["profile"]["world_size"] == 2
        assert set(own["profile"]["costs"]) == {"bf16"}
    sizes = [sum(row["numel"] for row in own["rows"]) for own in document["stages"]]
    parameters = re.search(r"([\d,]+) parameters of: ", said)
    assert parameters is not None
    assert sizes[0] == int(parameters[1].replace(",", "")), "every gradient of the first stage has a row"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--pipeline", "2", "--workers", "3"], "--pipeline 2 does not divide --workers 3"),
        (["--pipeline", "0"], "--pipeline 0 does not divide"),
        (["--pipeline", "-1"], "--pipeline -1 does not divide"),
        (["--pipeline", "2", "--workers", "-2"], "--workers is -2"),
        (["--pipeline", "2", "--micro-batches", "0"], "--micro-batches is 0; expected 1 or more"),
        (["--pipeline", "2", "--boundary", "1"], "--boundary 1 is not a share of activations"),
        (["--pipeline", "2", "--boundary", "0"], "--boundary 0 is not a share"),
        (["--pipeline", "2", "--boundary", "nan"], "--boundary nan is not a share"),
        (["--boundary", "0.1"], "without --pipeline STAGES a model has no cuts: leave --boundary out"),
        (["--micro-batches", "2"], "leave --micro-batches out"),
        (["a.py:build", "--pipeline", "2"], "--pipeline splits a model of the bench"),
        (["--pipeline", "2", "--profile", "x"], "leave --profile out"),
        (["--pipeline", "2", "--save-profile", "x"], "leave --save-profile out"),
        (["--pipeline", "2", "--json", "/nonexistent/o.json"], "cannot write /nonexistent/o.json"),
        (["--pipeline", "2", "--candidates", "nope"], "no candidate is called 'nope'"),
        (["--pipeline", "2", "--link", "none", "--model", "nope"], "no model is called 'nope'"),
        (["--pipeline", "2", "--link", "none", "--model", "xml", "--scale", "0.001"], "cannot be split into stages"),
        (["--pipeline", "4", "--workers", "4", "--link", "none"], "can be split into 2 or 3 stages, not 4"),
        (["--pipeline", "2", "--link", "none", "--micro-batches", "5"], "--micro-batches 5 does not divide the batch"),
    ],
)
def test_bad_input_is_one_clear_line_and_exit_code_2(args: list[str], message: str) -> None:
    done = CliRunner().invoke(app, ["plan", *args])
    assert done.exit_code == 2, done.output
    assert message in done.stderr
    assert done.stderr.startswith("thinwire plan: ")
    assert len(done.stderr.strip().splitlines()) == 1
    assert not done.stdout

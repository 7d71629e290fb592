"""Small programs refuse a file that they cannot write before they measure, not after, and runs that are not there."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from thinwire_lab.inputs import BadInput
from thinwire_lab.papers import gradients
from thinwire_lab.papers.dct import model_parallel
from thinwire_lab.papers.shared import sweep, timed
from thinwire_lab.studies import exchanges, kernels, pipeline, planner, server_clicks, server_hybrid, thin_links
from thinwire_lab.studies.convergence import __main__ as convergence


@pytest.mark.parametrize(
    ("program", "file", "options"),
    [
        (exchanges.main, "json", {"repeats": 1}),
        (kernels.main, "output", {"sizes": "8", "only": "largest"}),
        (pipeline.steps, "json", {"rounds": 1}),
        (planner.grid, "json", {"models": "transformer", "worlds": "2", "links": "none"}),
        (server_hybrid.main, "json", {"rounds": 1}),
        (server_clicks.main, "path", {"updates": 8}),
        (sweep.main, "json", {"worlds": "2", "largest": 1 << 16, "repeats": 1}),
        (timed.routes, "json", {"worlds": "2", "largest": 1 << 16}),
        (timed.selecting, "json", {}),
        (timed.layers, "json", {}),
        (gradients.main, "json", {"quick": True}),
        (model_parallel.accuracy, "json", {"problem": ["dlrm"], "seeds": 1, "steps": 1, "only": ["none"]}),
        (model_parallel.figures, "json", {"problem": "transformer", "steps": 1}),
        (convergence.run_all, "file", {"steps": 1, "workers": 1}),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_first(
    program: Callable[..., None], file: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    (tmp_path / "no folder").touch()
    with pytest.raises((BadInput, typer.BadParameter), match="cannot write"):
        program(**{file: tmp_path / "no folder" / "found"} | options)


@pytest.mark.parametrize("command", [convergence.tabulate, thin_links.main])
def test_runs_that_are_not_there_are_named(command: Callable[..., None], tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(command)
    done = CliRunner().invoke(app, [str(tmp_path / "gone.jsonl")])
    assert done.exit_code == 2
    assert "does not exist" in done.output

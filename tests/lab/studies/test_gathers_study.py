"""`thinwire_lab.studies.gathers`: virtual workers train as real ones do."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from thinwire_lab.studies.gathers import app

WAYS = "bf16;bf16, differences 4;qsgd, lossless"


@pytest.mark.slow
def test_virtual_workers_train_as_real_ones_and_runs_go_on(tmp_path: Path) -> None:
    text, file = tmp_path / "text", tmp_path / "runs.jsonl"
    text.write_bytes(Path(re.__file__).read_bytes() * 8)
    small = ["run", str(file), "--data", str(text), "--seeds", "0", "--steps", "6", "--every", "3", "--scale", "0.3"]
    for ways, link in ((WAYS, []), ("bf16", []), (WAYS, ["--link", "none"])):
        done = CliRunner().invoke(app, [*small, "--ways", ways, *link])
        assert done.exit_code == 0, done.output
    runs = [json.loads(line) for line in file.read_text().splitlines()]
    virtual, real = ({run["way"]: run["looks"] for run in runs if run["link"] == link} for link in (None, "none"))
    assert len(runs) == 2 * len(virtual) == 6
    for way, looks in virtual.items():
        assert [loss for _, loss in real[way]] == pytest.approx([loss for _, loss in looks], rel=2e-3)
        assert looks[1][1] < looks[0][1]
    assert "| bf16 | none | 6 |" in CliRunner().invoke(app, ["table", str(file)]).output

"""`thinwire_lab.studies.exchanges` from end to end, small."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = [sys.executable, "-m", "thinwire_lab.studies.exchanges"]


@pytest.mark.slow
def test_bytes_are_those_of_the_formulas_and_sums_are_right(tmp_path: Path) -> None:
    small = ["--worlds", "3", "--links", "100mbit", "--numel", "200000", "--density", "0.02", "--repeats", "2"]
    written = ["--json", str(tmp_path / "x.json")]
    done = subprocess.run([*PROGRAM, *small, *written], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads((tmp_path / "x.json").read_text())
    assert document["schema"] == "thinwire.exchanges/2"
    assert {row["exchange"] for row in document["rows"]} >= {"dense", "all-gather", "tree", "doubling", "owner-sharded"}
    for row in document["rows"]:
        assert row["identical"]
        assert row["right"] is not False
        assert row["declared_bytes"] == pytest.approx(row["formula_bytes"], rel=0.03)
        if row["measured_bytes"] is not None:
            expected = row["formula_bytes"] + row["header_bytes"]
            # Gloo adds a fixed few hundred bytes to each ring all-reduce, which small payloads show
            assert row["measured_bytes"] == pytest.approx(expected, rel=0.03, abs=3000)

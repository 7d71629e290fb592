"""The script for several hosts: it goes on from a checkpoint, also with another number of workers."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "elastic.py"


def _run(folder: Path, workers: int, steps: int) -> list[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(workers)]
    done = subprocess.run(
        [*command, str(SCRIPT), str(ROOT / "CHANGELOG.md"), str(folder), "--steps", str(steps), "--every", "10"],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "replicas identical" in done.stdout, done.stderr
    return done.stdout.splitlines()


def _waits(line: str) -> float:
    return float(line.rpartition(" ")[2])


@pytest.mark.slow
def test_it_goes_on_with_as_many_workers_and_with_fewer(tmp_path: Path) -> None:
    whole = _run(tmp_path / "whole", 2, 40)
    first, same = _run(tmp_path / "parts", 2, 20), _run(tmp_path / "parts", 2, 40)
    losses = [re.findall(r"loss [\d.]+", line) for line in whole]
    assert [re.findall(r"loss [\d.]+", line) for line in first[1:3] + same[1:3]] == losses[1:5]
    assert float(losses[4][0].split()[1]) < float(losses[1][0].split()[1])
    alone = _run(tmp_path / "parts", 1, 50)
    assert alone[0].startswith("from step 40, 1 workers")
    assert _waits(alone[0]) == pytest.approx(_waits(same[2]), rel=1e-6)
    assert _waits(alone[0]) > 0

"""The script for transformers: it trains, and goes on from a checkpoint with the same next steps."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed"),
]


def _run(text: Path, *options: str) -> list[str]:
    """Run the script under torchrun and return its lines."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(ROOT / "examples" / "gpt2.py"), str(text), "--steps", "20", *options],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "held-out loss" in done.stdout, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("recipe", ["dense", "fading"])
def test_it_goes_on_as_if_it_had_not_been_interrupted(recipe: str, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_bytes((ROOT / "CHANGELOG.md").read_bytes() * 4)
    options = ("--recipe", recipe, "--checkpoint", str(tmp_path / "checkpoint"))
    whole, rest = _run(text, *options), _run(text, *options, "--resume")
    assert [line.split(":")[0] for line in whole[:3]] == ["step 0", "step 10", "step 19"]
    assert rest[:2] == whole[1:3]
    losses = [float(found) for line in whole for found in re.findall(r"loss ([\d.]+)", line)]
    assert losses[-1] < losses[0] - 1
    for lines in (whole, rest):
        assert f"held-out loss {losses[-1]:.4f}, replicas identical" in lines[-1]

"""The tutorial: its script is the example, and the example saves bytes."""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "tutorial.py"
PAGE = (ROOT / "docs" / "tutorial.md").read_text()


def test_the_page_turns_its_script_into_the_example() -> None:
    script = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)[0]
    for change in re.findall(r"```diff\n(.*?)```", PAGE, flags=re.DOTALL):
        lines = [(line[:1], line[1:] + "\n") for line in change.splitlines()]
        before = "".join(text for sign, text in lines if sign != "+")
        assert script.count(before) == 1, before
        script = script.replace(before, "".join(text for sign, text in lines if sign != "-"))
    assert script == EXAMPLE.read_text().partition('"""\n\n')[2]


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "ratio"), [("dense", 1.0), ("dgc", 1 / 50)])
def test_the_example_counts_what_it_sends(recipe: str, ratio: float, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(port)]
    done = subprocess.run(
        [*command, str(EXAMPLE), recipe, "3"],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / f"{recipe}.json").read_text())
    assert len(rows) == 3
    assert 0.5 * ratio < rows[-1]["sent"] / (3 * 1_196_800 * 4) <= ratio

"""A gradient's walk through the library does not grow longer."""

import re
import runpy
import sys
from pathlib import Path
from unittest.mock import patch

import pytest

WALK = str(Path(__file__).parents[1] / "walk.py")
MOST = {"topk": (41, 380, 420), "dgc": (46, 480, 510), "fading": (54, 570, 610)}
"""At most so many files, calls and moves between files in a settled step."""


@pytest.mark.parametrize(
    "recipe", [*(pytest.param(name, marks=pytest.mark.slow) for name in ("topk", "dgc")), "fading"]
)
def test_a_gradient_walks_no_further_than_it_did(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    # In this process: to import torch in another takes longer than the walk.
    with patch.object(sys, "argv", [WALK, recipe, "--files"]), pytest.raises(SystemExit) as ended:
        runpy.run_path(WALK, run_name="__main__")
    assert ended.value.code == 0
    said = capsys.readouterr().out
    found = re.search(r"files (\d+), functions \d+, calls (\d+), moves (\d+)", said)
    assert found
    assert all(int(count) <= most for count, most in zip(found.groups(), MOST[recipe], strict=True)), said

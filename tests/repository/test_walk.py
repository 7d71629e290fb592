"""A gradient's walk through the library does not grow longer."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

WALK = Path(__file__).parents[1] / "walk.py"
MOST = {"topk": (41, 375, 420), "dgc": (46, 470, 510), "fading": (53, 565, 605)}
"""At most so many files, calls and moves between files in a settled step."""


@pytest.mark.parametrize(
    "recipe", [*(pytest.param(name, marks=pytest.mark.slow) for name in ("topk", "dgc")), "fading"]
)
def test_a_gradient_walks_no_further_than_it_did(recipe: str) -> None:
    command = [sys.executable, str(WALK), recipe, "--files"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"files (\d+), functions \d+, calls (\d+), moves (\d+)", said)
    assert found
    assert all(int(count) <= most for count, most in zip(found.groups(), MOST[recipe], strict=True)), said

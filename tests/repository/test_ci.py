"""CI: runs take turns at what takes too long each time, and newcomers' commands are those that are run."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TURNS = 83
FEW = [*(f"oldest_torch -m quick --share {share}/3" for share in range(3))]
FEW += ["newer_python 3.12 -m quick", "newer_python 3.13 -m quick"]
FEW += [f"framework {name}" for name in ("ray", "torchft", "torchtitan")]
ALL = {*FEW, *(f"pytest -m slow --share {share}/42" for share in range(42))}


@pytest.fixture(scope="module")
def turns() -> list[str]:
    """Return what runs on commits 0, 1, 2 and so on do, twice around."""
    command = "for n in $(seq 0 165); do .ci/turn $n; done"
    return subprocess.run(
        ["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()


def test_runs_any_number_of_commits_apart_do_everything(turns: list[str]) -> None:
    assert turns[:TURNS] == turns[TURNS:]
    for stride in range(1, TURNS):
        assert {turns[run * stride % TURNS] for run in range(TURNS)} == ALL, f"runs {stride} commits apart"


def test_runs_that_know_what_was_done_repeat_nothing(tmp_path: Path) -> None:
    script = "for n in $(seq 0 99); do .ci/turn $((n * n)) $0 | tee -a $0; done"
    done = subprocess.run(
        ["bash", "-c", script, tmp_path / "taken"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    turns = done.stdout.splitlines()
    assert {*turns[: len(ALL)]} == {*turns[len(ALL) :]} == ALL
    assert len(turns) == 2 * len(ALL)


def test_a_turn_that_failed_is_repeated(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("pytest -m slow --share 3/42\n")
    script = "for n in 5 17 30; do .ci/turn $n $0; done"
    done = subprocess.run(
        ["bash", "-c", script, tmp_path / "taken"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert len(set(done.stdout.splitlines())) == 1


def test_what_turns_call_is_there() -> None:
    steps = (ROOT / ".ci/steps").read_text()
    assert all(re.search(rf"^{turn.split()[0]}\(\)", steps, re.MULTILINE) for turn in FEW)


def test_the_readme_installs_for_tests_what_no_framework_needs() -> None:
    (command,) = re.findall(r"^pip install .* && pytest$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert "'.[test]'" in command
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert not re.search("lightning|accelerate|transformers|triton", " ".join(extras["test"]))


@pytest.mark.parametrize(
    ("message", "passes"),
    [
        ("Bench: it says what\n\nAnd why.\n# comment\n", True),
        ("Bench: it says what\n# comment\n", False),
        ("Bench: it says what\nAnd why.\n", False),
        ("x" * 73 + "\n\nAnd why.\n", False),
    ],
)
def test_a_commit_says_what_and_why(tmp_path: Path, message: str, passes: bool) -> None:
    (tmp_path / "message").write_text(message)
    done = subprocess.run([ROOT / ".ci/message", tmp_path / "message"], check=False)
    assert (done.returncode == 0) == passes

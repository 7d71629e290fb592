"""The release: one version everywhere, changes of a line each, and a tag for what is finished alone."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

import thinwire

ROOT = Path(__file__).parents[2]
VERSION = thinwire.__version__
CHANGES = (ROOT / "CHANGELOG.md").read_text()


def test_the_latest_changes_are_those_of_this_version() -> None:
    latest = re.findall(r"^## (.*)$", CHANGES, re.MULTILINE)[0]
    assert re.fullmatch(rf"{re.escape(VERSION)} - (unreleased|\d{{4}}-\d\d-\d\d)", latest)
    assert f"\nversion: {VERSION}\n" in (ROOT / "CITATION.cff").read_text()


def test_a_change_is_a_line_under_one_of_four_headings() -> None:
    assert set(re.findall(r"^### (.*)$", CHANGES, re.MULTILINE)) <= {"Added", "Changed", "Fixed", "Removed"}
    assert not [line for line in CHANGES.splitlines() if len(line) > 100]


def test_what_is_read_by_other_tools_can_be_read() -> None:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed: pip install -e '.[test]'")
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert len(citation["references"]) == 5
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert {hook["language"] for hook in repository["hooks"]} == {"system"}  # needs no network
    (job,) = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"].values()
    assert job["steps"][0]["with"]["fetch-depth"] == 0  # or every commit would have the same turn


def _git(checkout: Path, *words: str) -> None:
    who = ["-c", "user.name=somebody", "-c", "user.email=somebody@localhost"]
    subprocess.run(["git", "-C", str(checkout), *who, *words], check=True, capture_output=True)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a repository with what the script reads, and changes without a date."""
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    for folder in (".ci", "src/thinwire"):
        (tmp_path / folder).mkdir(parents=True)
    for name in (".ci/release", ".ci/steps", "src/thinwire/version.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "CHANGELOG.md").write_text(f"## {VERSION} - unreleased\n")
    _git(tmp_path, "init")
    _git(tmp_path, "add", ".")
    _git(tmp_path, "commit", "-m", "all")
    return tmp_path


def _refusal(checkout: Path) -> str:
    done = subprocess.run([checkout / ".ci/release", "--tag"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    return done.stderr


def test_only_a_dated_version_in_a_clean_tree_is_tagged_and_once(checkout: Path) -> None:
    assert "has no line '## " in _refusal(checkout)
    (checkout / "CHANGELOG.md").write_text(f"## {VERSION} - 2026-01-02\n")
    assert "the tree is not clean" in _refusal(checkout)
    _git(checkout, "commit", "-am", "dated")
    _git(checkout, "tag", f"v{VERSION}")
    assert f"there is a v{VERSION}" in _refusal(checkout)

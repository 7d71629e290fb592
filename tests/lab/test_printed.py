"""What becomes of a command whose output nobody takes: a pipe to `head`, or a device that is full."""

import errno
import json
import os
import subprocess
import sys
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path

import pytest

import thinwire
from thinwire_lab.cli import app
from thinwire_lab.show.printed import printing

PIPE = "Broken pipe"
FULL = "No space left on device"
SMALL = ["--model", "xml", "--scale", "0.001", "--steps", "2", "--recipes", "dense", "--link", "none"]


def _run(reason: str, *args: str) -> tuple[int, list[str]]:
    """Run a command that cannot print. Return its exit code, and its lines on standard error."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") if reason == PIPE else Path("/dev/full").open("w") as out:
        done = subprocess.run([sys.executable, "-m", "thinwire", *args], stdout=out, stderr=subprocess.PIPE, text=True)
    return done.returncode, done.stderr.splitlines()


@pytest.mark.first(1)
@pytest.mark.parametrize("reason", [PIPE, FULL])
@pytest.mark.parametrize(
    ("args", "key"), [(["simulate", "--workers", "8"], "rows"), (["bench", *SMALL], "rows")], ids=["simulate", "bench"]
)
def test_what_was_to_be_written_is_there_though_nothing_could_be_printed(
    reason: str, args: list[str], key: str, tmp_path: Path
) -> None:
    path = tmp_path / "out.json"
    code, said = _run(reason, *args, "--json", str(path))
    assert (code, said) == (1, [f"thinwire: not all could be printed: {reason}; the files are written as asked"])
    assert json.loads(path.read_text())[key]


@pytest.mark.first(1)
@pytest.mark.parametrize("reason", [PIPE, FULL])
@pytest.mark.parametrize("args", [["--help"], ["bench", "--list"], ["bench", *SMALL, "--steps", "100000000"]])
def test_without_files_a_command_ends_as_soon_as_it_cannot_print(reason: str, args: list[str]) -> None:
    said = f"thinwire: not all could be printed: {reason}; print to what takes all of it, or write files"
    assert _run(reason, *args) == (1, [said])


def test_files_that_find_no_room_are_said_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    def act(error: OSError) -> None:
        raise error

    assert printing(partial(act, OSError(errno.ENOSPC, FULL))) == 1
    line = f"thinwire: files could not be written: {FULL}; make room for them, and run it again\n"
    assert capsys.readouterr().err == line
    with pytest.raises(PermissionError):
        printing(partial(act, PermissionError()))


def test_what_a_terminal_cannot_show_ends_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "thinwire", "bench", "--list"],
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"all of ?, uncompressed" in done.stdout


def test_bad_input_keeps_its_line_and_its_code(capsys: pytest.CaptureFixture[str]) -> None:
    with Path("/dev/full").open("w") as out, redirect_stdout(out):
        assert printing(partial(app, ["simulate", "--workers", "0"])) == 2
    said = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in said] == ["thinwire simulate"]


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    app(["--version"], standalone_mode=False)
    assert capsys.readouterr().out.strip() == thinwire.__version__

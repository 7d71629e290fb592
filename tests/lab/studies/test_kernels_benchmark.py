"""`thinwire_lab.studies.kernels`, small; and that what is wrong gets no speed."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner, Result

from thinwire import kernels
from thinwire_lab.check import speed
from thinwire_lab.check.kernels import KERNELS
from thinwire_lab.studies.kernels import COMPARED, Row, compared, main, measured, numbers

CPU = torch.device("cpu")


def _ended(*arguments: str) -> Result:
    app = typer.Typer()
    app.command()(main)
    return CliRunner().invoke(app, arguments)


def _row(name: str) -> Row:
    (row,) = measured([name], 5000, CPU, 1)
    return row


@pytest.mark.slow
def test_every_row_is_right_and_timed(tmp_path: Path) -> None:
    assert _ended("--sizes", "5000", "--repeats", "2", "--output", str(tmp_path / "x.json")).exit_code == 0
    document = json.loads((tmp_path / "x.json").read_text())
    assert document["schema"] == "thinwire.kernels/2"
    assert [row["name"] for row in document["rows"]] == [*speed.ROWS, *sorted(KERNELS)]
    for row in document["rows"]:
        assert row["correct"]
        assert set(row["seconds"]) == {"p20", "p50", "p80"}
        assert row["over_copy"] > 0
        assert row["moved"] > 0


def test_a_kernel_that_differs_gets_no_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = kernels.largest.cpu
    monkeypatch.setattr(kernels.largest, "cpu", lambda x, k: right(x, k).flip(0))
    row = _row("largest")
    assert not row.correct
    assert "differ" in row.why
    assert (row.seconds, row.over_copy, row.reference) == (None, None, None)
    assert _row("select").correct
    assert _ended("--sizes", "5000", "--only", "largest").exit_code == 1


def test_what_raises_is_not_correct_either(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError("no such thing")

    monkeypatch.setattr(kernels.select, "cpu", fails)
    row = _row("select")
    assert not row.correct
    assert "RuntimeError: no such thing" in row.why


def test_a_pass_moves_what_it_reads_and_writes() -> None:
    assert _row("accumulate").moved == 3 * 4 * 5000
    assert _row("encode, momentum correction").moved == 5 * 4 * 5000


def test_a_gpus_kernels_are_compared_at_the_size_itself() -> None:
    assert compared(1 << 27, torch.device("cuda")) == (COMPARED, 1 << 27)
    assert compared(1 << 27, CPU) == (COMPARED,)
    assert compared(1000, torch.device("cuda")) == compared(1000, CPU) == (1000,)


def test_sizes_as_people_write_them() -> None:
    assert numbers("126.72M, 2^10,1e3") == [1000, 1024, 126_720_000]


@pytest.mark.parametrize(
    "arguments", [("--only", "nothing"), ("--sizes", "many"), ("--sizes", "0"), ("--device", "tpu")]
)
def test_options_that_make_no_sense_are_refused(arguments: tuple[str, str]) -> None:
    ended = _ended(*arguments)
    assert ended.exit_code == 2
    assert arguments[0] in ended.output

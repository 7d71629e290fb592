"""`thinwire watch`: the table from two looks, and the command."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import thinwire
from thinwire.server.status import ServerStatus, TrainerStatus
from thinwire_lab.cli import app
from thinwire_lab.watch.view import Look, view

TRAINER = TrainerStatus(updates=10, behind=20, loss=2.5, sent_bytes=1000, received_bytes=500, quiet=0.25)
STATUS = ServerStatus(
    version=12,
    staleness={2: 12},
    updates={"a" * 32: 10},
    trainers={"a" * 32: TRAINER},
    dropped=0,
    sent_bytes=1000,
    received_bytes=500,
)


def _later(**changed: Any) -> Look:
    return Look(at=102.0, status=replace(STATUS, version=24, trainers={"a" * 32: replace(TRAINER, **changed)}))


def _row(later: Look) -> list[str]:
    (row,) = view("here:1", Look(at=100.0, status=STATUS), later).rows
    return list(row)


def test_paces_are_differences_over_the_time_between() -> None:
    row = _row(_later(updates=14, behind=26, loss=1.5, sent_bytes=5000, received_bytes=2500))
    assert row == ["a" * 8, "14", "2.0", "1.5", "1.00 kB", "2.00 kB", "1.500", "0.2 s ago"]


def test_without_an_update_in_between_staleness_is_that_of_all() -> None:
    assert _row(_later())[2:4] == ["0.0", "2.0"]


def test_bytes_of_a_new_connection_count_from_then_on() -> None:
    assert _row(_later(updates=14, sent_bytes=100, received_bytes=100))[4] == "0 B"


def test_the_title_counts_steps_and_those_who_are_gone() -> None:
    gone = Look(at=102.0, status=replace(STATUS, version=24, updates={"a" * 32: 10, "b" * 32: 3}))
    assert "24 steps, 6.0 a second · 1 trainer, 1 gone" in view("here:1", Look(at=100.0, status=STATUS), gone).title


@pytest.mark.parametrize(
    ("arguments", "told"), [(["nowhere"], "expected host:port"), (["a:1", "--every", "0"], "more than 0")]
)
def test_bad_input_is_told(arguments: list[str], told: str) -> None:
    result = CliRunner().invoke(app, ["watch", *arguments])
    assert result.exit_code == 2
    assert told in result.output


def test_one_look_at_a_server() -> None:
    recipe = thinwire.recipes.dense()
    with (
        thinwire.serve(nn.Linear(2, 2), recipe, make_optimizer=lambda p: torch.optim.SGD(p, lr=0.1)) as server,
        thinwire.connect(nn.Linear(2, 2), recipe, address=server.address),
    ):
        result = CliRunner().invoke(app, ["watch", server.address, "--once", "--every", "0.01"])
    assert result.exit_code == 0
    assert "1 trainer" in result.output

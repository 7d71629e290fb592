"""Whoever has a ticket may watch a server; watching changes nothing."""

import json
import math
import re

import pytest
import torch
from served import (
    Raw,
    Vector,
    closed,  # noqa: F401 - a fixture
    dense,
    gradients,
    joined,
    started,
)
from typer.testing import CliRunner

from thinwire.wire import sockets
from thinwire.wire.frames import GoneError, Kind
from thinwire_lab.cli import app
from thinwire_lab.watch import look


def test_a_look_says_what_the_server_says_itself() -> None:
    model = Vector()
    with started(recipe=dense()) as server, joined(server, dense(), model) as trainer:
        for number, gradient in enumerate(gradients(3), start=1):
            model.give(gradient)
            trainer.step(loss=torch.tensor(1 / number, requires_grad=True))
        seen, said = look(server.address), server.status()
        assert (seen["version"], seen["staleness"], seen["updates"]) == (said.version, {"0": 3}, said.updates)
        (mine,) = seen["trainers"].values()
        assert mine["updates"] == 3
        assert mine["loss"] == pytest.approx(1 / 3)
        assert mine["received_bytes"] == trainer.traffic().sent_bytes
        assert mine["sent_bytes"] > 0


def test_steps_behind_add_up() -> None:
    fast, slow = Vector(), Vector()
    with started(recipe=dense(), trainers=2) as server:
        late, quick = joined(server, dense(), slow), joined(server, dense(), fast)
        for gradient in gradients(4):
            fast.give(gradient)
            quick.step()
        slow.give(gradients(1)[0])
        late.step()
        assert sorted(each["behind"] for each in look(server.address)["trainers"].values()) == [0, 4]


@pytest.mark.parametrize("told", [None, math.nan, math.inf])
def test_a_loss_that_is_no_number_is_none(told: float | None) -> None:
    model = Vector()
    with started(recipe=dense()) as server, joined(server, dense(), model) as trainer:
        model.give(gradients(1)[0])
        trainer.step(loss=told)
        (mine,) = look(server.address)["trainers"].values()
        assert mine["loss"] is None


def test_a_server_waits_for_nobody_who_watches() -> None:
    server = started(timeout=20.0)
    assert not look(server.address)["trainers"]
    joined(server).close()
    assert server.wait(10.0)


def test_a_trainer_cannot_watch_on_its_connection() -> None:
    raw = Raw(started().address)
    raw.send(Kind.WATCH)
    with pytest.raises(GoneError):
        raw.receive()


def test_the_command_prints_what_the_server_says_as_json() -> None:
    server = started()
    found = CliRunner().invoke(app, ["watch", server.address])
    assert json.loads(found.stdout) == {"address": server.address, **look(server.address)}
    server.close()
    gone = CliRunner().invoke(app, ["watch", server.address])
    assert gone.exit_code == 1
    assert re.match(
        f"thinwire watch: {server.address}: no ticket .*set THINWIRE_TICKET to its server.ticket", gone.output
    )
    assert "reconnect" not in gone.output


@pytest.mark.parametrize("every", ["0", "-1", "nan", "inf"])
def test_a_time_that_cannot_be_slept_is_refused_before_anything_is_printed(every: str) -> None:
    found = CliRunner().invoke(app, ["watch", "127.0.0.1:1", "--watch", every])
    assert found.exit_code == 2
    assert found.stderr == f"thinwire watch: --watch is {every}; expected seconds, above 0 and below 1e+09\n"


def test_each_of_several_servers_has_its_ticket(monkeypatch: pytest.MonkeyPatch) -> None:
    servers = [started() for _ in range(2)]
    monkeypatch.setenv("THINWIRE_TICKET", ",".join(each.ticket for each in servers))
    found = CliRunner().invoke(app, ["watch", *(each.address for each in servers)])
    assert [json.loads(line)["address"] for line in found.stdout.splitlines()] == [each.address for each in servers]


def test_without_pyzmq_the_command_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "zmq", None)
    found = CliRunner().invoke(app, ["watch", "127.0.0.1:1"])
    assert found.exit_code == 1
    assert found.output.splitlines() == [
        "thinwire watch: a parameter server needs pyzmq: pip install 'thinwire[server]'"
    ]

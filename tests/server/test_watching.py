"""Whoever knows the secret may watch a server; watching changes nothing."""

import math
import time

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

from thinwire.errors import ServerError
from thinwire.server.frames import GoneError, Kind
from thinwire_lab.watch.connection import Watch


def test_a_look_says_what_the_server_says_itself() -> None:
    model = Vector()
    with started(recipe=dense()) as server, joined(server, dense(), model) as trainer, Watch(server.address) as watch:
        for number, gradient in enumerate(gradients(3), start=1):
            model.give(gradient)
            trainer.step(loss=torch.tensor(1 / number, requires_grad=True))
        seen, said = watch.status(), server.status()
        assert (seen.version, seen.staleness, seen.updates) == (said.version, said.staleness, said.updates)
        (mine,) = seen.trainers.values()
        assert mine.updates == 3
        assert mine.loss == pytest.approx(1 / 3)
        assert mine.received_bytes == trainer.traffic().sent_bytes
        assert 0 < mine.sent_bytes <= trainer.traffic().received_bytes  # the latest answer may not be counted yet


def test_steps_behind_add_up() -> None:
    fast, slow = Vector(), Vector()
    with started(recipe=dense(), trainers=2) as server:
        late, quick = joined(server, dense(), slow), joined(server, dense(), fast)
        for gradient in gradients(4):
            fast.give(gradient)
            quick.step()
        slow.give(gradients(1)[0])
        late.step()
        with Watch(server.address) as watch:
            assert sorted(each.behind for each in watch.status().trainers.values()) == [0, 4]


@pytest.mark.parametrize("told", [None, math.nan, math.inf])
def test_a_loss_that_is_no_number_is_none(told: float | None) -> None:
    model = Vector()
    with started(recipe=dense()) as server, joined(server, dense(), model) as trainer, Watch(server.address) as watch:
        model.give(gradients(1)[0])
        trainer.step(loss=told)
        (mine,) = watch.status().trainers.values()
        assert mine.loss is None


def test_whoever_does_not_know_the_secret_sees_nothing() -> None:
    with started(secret="hush, and long enough") as server:
        with pytest.raises(ServerError, match="has another secret"):
            Watch(server.address, secret="Hush, and long enough")
        with Watch(server.address, secret="hush, and long enough") as watch:
            assert watch.status().version == 0


def test_a_server_waits_for_nobody_who_watches() -> None:
    server = started(timeout=20.0)
    with Watch(server.address) as watch:
        joined(server).close()
        assert server.wait(10.0)
        assert not watch.status().trainers
    time.sleep(0.2)  # until the server has seen that it hung up
    assert server.wait(1.0)


def test_a_trainer_cannot_watch_on_its_connection() -> None:
    raw = Raw(started().address)
    raw.wire.send(Kind.WATCH)
    with pytest.raises(GoneError):
        raw.wire.receive()


def test_a_server_that_is_gone_is_an_error() -> None:
    server = started()
    with Watch(server.address) as watch:
        server.close()
        with pytest.raises(ServerError, match="is gone"):
            watch.status()
    with pytest.raises(ServerError, match="is it running"):
        Watch(server.address)

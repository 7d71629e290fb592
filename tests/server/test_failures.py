"""What goes wrong on one side ends in an error on both, and no update is lost, doubled or taken for saved."""

import math
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

import pytest
import torch
from served import (
    NUMEL,
    Busy,
    Proxy,
    Raw,
    Table,
    Vector,
    closed,
    connections,
    crash,
    cut,
    dense,
    gradients,
    joined,
    soon,
    started,
    thresholded,
    waiting,
)
from torch import nn

from thinwire import recipes
from thinwire.errors import FingerprintError, ServerError, StateError
from thinwire.reducer import Reducer
from thinwire.server import Server, Trainer, connect
from thinwire.server.hub import Session
from thinwire.server.saving import Durable
from thinwire.wire.frames import PIECE, WINDOW, Flag, FrameError, GoneError, Kind, Talk, numbered
from thinwire.wire.layout import Layout

__all__ = ["closed"]
KEYS = {"checkpoint.key", "checkpoint.key.ticket"}


@pytest.mark.slow
def test_a_trainer_that_computes_for_longer_than_the_timeout_stays() -> None:
    server = started(timeout=1.0)
    with joined(server, timeout=1.0) as trainer:
        for gradient in gradients(2):
            time.sleep(1.6)
            trainer.model.give(gradient)  # type: ignore[operator]
            assert trainer.step()
    assert server.status().version == 2


@pytest.mark.slow
def test_nobody_is_lost_while_the_server_computes_a_step_for_many_timeouts() -> None:
    server = started(recipe=dense(), make_optimizer=Busy, timeout=5.0)
    (busy,) = server._hub.central.optimizers
    assert isinstance(busy, Busy)
    proxy = Proxy(server.address)
    trainers = [joined(server, dense(), address=proxy.address, ticket=server.ticket, timeout=5.0) for _ in range(16)]
    steps = [threading.Thread(target=each.step, daemon=True) for each in trainers]
    for each, step in zip(trainers, steps, strict=True):
        each.model.give(gradients(1)[0])  # type: ignore[operator]
        step.start()
    assert busy.begun.wait(20)
    beats = proxy.passed
    try:
        assert soon(lambda: proxy.passed > beats + 16 * 20 * 4, 120)  # twenty heartbeats of each trainer: five timeouts
        late = threading.Thread(
            target=joined,
            args=(server, dense()),
            kwargs={"address": proxy.address, "ticket": server.ticket},
            daemon=True,
        )
        late.start()
        status = server.status()
        assert (status.version, len(status.trainers)) == (0, 16)
    finally:
        busy.done.set()
    for step in (*steps, late):
        step.join(60)
    assert server.status().version == 16
    assert proxy.accepted == len(server.status().trainers) == 17  # so none has joined twice


@pytest.mark.parametrize("rows", [False, True])
def test_parameters_that_are_not_finite_end_training_and_are_never_saved(rows: bool, tmp_path: Path) -> None:
    path, make = tmp_path / "checkpoint", Table if rows else Vector
    server = started(make(), dense(), checkpoint=path, every=1e6)
    trainer, other = (joined(server, dense(), make()) for _ in range(2))
    server.save()
    for each, value in ((trainer, -math.inf), (other, math.nan)):
        p = each.model.get_parameter("rows.weight" if rows else "small")
        gradient = torch.full_like(p, max(value, torch.finfo(p.dtype).min))
        p.grad = gradient.to_sparse(1) if rows else gradient
    assert trainer.step()
    with pytest.raises(ServerError, match="its parameters are not finite after this step"):
        trainer.step()
    assert soon(lambda: other._channels[0]._shared.error is not None)  # though it sends nothing
    with pytest.raises(ServerError, match="not finite after this step"):
        other.step()
    server.close()
    with started(make(), dense(), checkpoint=path) as again:
        assert again.status().version == 0


def test_parameters_that_are_not_finite_are_not_served(tmp_path: Path) -> None:
    central = Vector()
    central.large.data[7] = torch.nan
    with pytest.raises(ValueError, match="large is not finite"):
        started(central, checkpoint=tmp_path / "server.pt")
    assert not (tmp_path / "server.pt").exists()


def test_nobody_waits_for_a_trainer_that_was_dropped() -> None:
    server = started(staleness=0, trainers=2)
    recipe, model = thresholded(), Vector()
    other, dropped = joined(server), connect(model, recipe, address=server.address)
    with ThreadPoolExecutor(1) as pool, ExitStack() as ending:
        ending.callback(other.close, goodbye=False)
        step = pool.submit(other.step)
        model.give(torch.ones(NUMEL, dtype=torch.float64))
        dropped.step()
        assert step.result()
        assert waiting(recipe).any()
        step = pool.submit(other.step)
        del dropped
        assert soon(step.done, 20.0)
    assert soon(lambda: not waiting(recipe).any(), 20.0)
    assert joined(server, recipe, model)


def test_a_trainer_whose_gradients_are_never_finite_gives_up() -> None:
    trainer = joined(started())

    def skip() -> None:
        trainer.model.give(torch.full((200,), math.nan, dtype=torch.float64))  # type: ignore[operator]
        for _ in range(19):
            assert not trainer.step()

    skip()
    trainer.model.give(gradients(1)[0])  # type: ignore[operator]
    assert trainer.step()
    skip()
    with pytest.raises(FloatingPointError, match="not been finite for 20 steps"):
        trainer.step()


@pytest.mark.parametrize(("staleness", "waits"), [(0, True), (1, True), (None, False)])
def test_the_log_says_who_is_waited_for(staleness: int | None, waits: bool, caplog: pytest.LogCaptureFixture) -> None:
    server = started(staleness=staleness, trainers=3)
    server._hub.rule.patience = 0.0
    trainer, late = joined(server), joined(server)
    trainer.model.give(gradients(1)[0])  # type: ignore[operator]
    step = threading.Thread(target=trainer.step, daemon=True)
    step.start()
    assert soon(lambda: "s for 1 more to join: serve has trainers=3" in caplog.text)
    caplog.clear()
    joined(server).close()
    number = late._channels[0]._settings.trainer[:8]
    assert soon(lambda: f"s for {number} at 127.0.0.1 (latest update 0)" in caplog.text or not waits)
    late.close()
    step.join(20)
    assert server.status().version == 1


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_keeps_neither_port_nor_connections_and_changes_nothing(tmp_path: Path) -> None:
    pipes = socket.socketpair()  # as multiprocessing has them: not the server's business
    server = started(checkpoint=tmp_path / "checkpoint")
    trainer = joined(server)
    server.save()
    assert connections(server.address, listening=True) == 2
    child = os.fork()
    if not child:
        signal.alarm(60)
        server.close()  # which saves nothing
        with suppress(ServerError):
            trainer.step()
            os._exit(100)
        os._exit(connections(server.address, listening=True))
    assert os.waitpid(child, 0)[1] == 0
    server.save()
    assert joined(server).step()
    for each in pipes:
        each.close()


class Third(torch.optim.lr_scheduler.LambdaLR):
    """Raises when it is stepped for the third time."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer, lambda step: 1.0 if step < 3 else 1 / 0)


@pytest.mark.parametrize("staleness", [0, None])
def test_a_step_that_raises_ends_training_on_both_sides_and_nothing_is_saved_after_it(
    staleness: int | None, tmp_path: Path
) -> None:
    path = tmp_path / "checkpoint"
    server = started(
        Vector(), dense(), make_scheduler=Third, staleness=staleness, trainers=2, checkpoint=path, every=1e6
    )
    ends: list[str] = []

    def train() -> None:
        trainer = joined(server, dense(), reconnect=5.0)
        try:
            for gradient in gradients(9):
                trainer.model.give(gradient)  # type: ignore[operator]
                trainer.step()
        except ServerError as error:
            ends.append(str(error))

    both = [threading.Thread(target=train) for _ in range(2)]
    for each in both:
        each.start()
    for each in both:
        each.join(20)
    assert len(ends) == 2
    assert all("raised ZeroDivisionError" in end for end in ends)
    with pytest.raises(ServerError, match="ZeroDivisionError"):
        server.wait()
    with pytest.raises(ServerError, match="ZeroDivisionError"):
        server.save()
    server.close()
    assert not path.exists()


def test_an_optimizer_that_cannot_take_rows_is_an_error_at_the_first_update() -> None:
    server = started(Table(), dense(), make_optimizer=torch.optim.Adam)
    trainer = joined(server, dense(), Table())
    trainer.model(torch.arange(3)).sum().backward()
    with pytest.raises(ServerError, match="rows_optimizer="):
        trainer.step()


def test_a_full_disk_is_survived_and_leaves_no_half_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, save = tmp_path / "checkpoint", torch.save
    server = started(checkpoint=path, every=0.05)
    trainer = joined(server)
    full = threading.Event()

    def refusing(state: Any, file: Any) -> None:
        full.set()
        file.write(b"half")
        raise RuntimeError("unexpected pos")

    monkeypatch.setattr(torch, "save", refusing)
    trainer.model.give(gradients(1)[0])  # type: ignore[operator]
    trainer.step()
    assert full.wait(10)
    monkeypatch.setattr(torch, "save", save)
    assert trainer.settle(10)
    server.close()  # or it writes the next
    assert {each.name for each in tmp_path.iterdir()} - KEYS <= {"checkpoint", "checkpoint.previous"}


def test_a_save_that_fails_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = started(checkpoint=tmp_path / "checkpoint", every=1e6)
    trainer = joined(server)
    trainer.model.give(gradients(1)[0])  # type: ignore[operator]
    trainer.step()

    def failing() -> dict[str, Any]:
        monkeypatch.undo()
        raise RuntimeError("not enough memory")

    monkeypatch.setattr(server._hub.central, "state", failing)
    assert trainer.settle(20)


def test_closing_on_a_full_disk_is_an_error_and_lets_the_model_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, path = Vector(), tmp_path / "checkpoint"
    server = started(model, checkpoint=path, every=1e6)
    with monkeypatch.context() as full:
        full.setattr(torch, "save", lambda *_: (_ for _ in ()).throw(RuntimeError("unexpected pos")))
        with pytest.raises(OSError, match="could not be written"):
            server.close()
    with started(model):  # it is free
        server.save()  # as there is room again
    assert path.exists()


def test_a_serve_that_fails_late_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    model, before = Vector(), set(threading.enumerate())
    with monkeypatch.context() as patch:
        patch.setattr("thinwire.server.server.announce", lambda *_: (_ for _ in ()).throw(RuntimeError("the store")))
        with pytest.raises(RuntimeError, match="store"):
            started(model)
    assert set(threading.enumerate()) == before
    assert started(model)


def test_an_older_state_never_replaces_a_newer_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = started(checkpoint=tmp_path / "checkpoint", every=1e6)
    trainer, save, slow = joined(server), Durable.save, threading.Event()

    def first_slow(self: Durable, state: dict[str, Any], **options: bool) -> None:
        if state["version"] == 1:
            slow.set()
            time.sleep(0.5)
        save(self, state, **options)

    monkeypatch.setattr(Durable, "save", first_slow)
    for i, gradient in enumerate(gradients(2)):
        trainer.model.give(gradient)  # type: ignore[operator]
        trainer.step()
        if i == 0:
            older = threading.Thread(target=server.save)
            older.start()
            assert slow.wait(10)
    server.save()
    older.join()
    versions: list[int] = []
    Durable(tmp_path / "checkpoint").load(lambda saved: versions.append(saved["version"]))
    assert versions == [2]


def test_an_update_that_cannot_be_encoded_leaves_no_gap() -> None:
    server = started(Table(), dense())
    trainer = joined(server, dense(), Table())
    trainer.model(torch.arange(3)).sum().backward()
    weight = trainer.model.get_parameter("rows.weight")
    good = weight.grad
    weight.grad = torch.ones_like(weight)
    with pytest.raises(TypeError, match=r"rows.weight got a dense gradient; expected a sparse one"):
        trainer.step()
    weight.grad = good
    assert trainer.step()
    assert list(server.status().updates.values()) == [1]


def test_a_server_that_keeps_hanging_up_is_an_error_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    server = started()
    trainer = joined(server, reconnect=1.0)
    monkeypatch.setattr(Session, "_update", lambda session, _: session.end("no"))
    trainer.model.give(gradients(1)[0])  # type: ignore[operator]
    began = time.monotonic()
    with pytest.raises(ServerError, match="closes the connection whenever"):
        trainer.step()
    assert time.monotonic() - began < 15


def test_frozen_parameters_that_differ_are_refused() -> None:
    def model(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        made = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
        made[0].requires_grad_(requires_grad=False)
        return made

    server = started(model(0), dense())
    joined(server, dense(), model(0))
    with pytest.raises(FingerprintError, match="what is frozen"):
        joined(server, dense(), model(1))


def test_memory_is_counted_once_with_several_servers() -> None:
    recipe = recipes.topk(density=0.05, minimum_size=0)
    servers = [started(recipe=recipes.topk(density=0.05, minimum_size=0), servers=2, index=i) for i in range(2)]
    trainer = joined(servers[0], recipe, address=[each.address for each in servers], servers=2)
    trainer.model.give(gradients(1)[0])  # type: ignore[operator]
    trainer.step()
    assert trainer.memory.waiting == sum(memory.nbytes for memory in recipe.memories())


@pytest.mark.parametrize("saved", [torch.ones(3), {"format": 1}, [1]])
def test_a_checkpoint_of_something_else_is_named(saved: Any, tmp_path: Path) -> None:
    torch.save(saved, tmp_path / "checkpoint")
    with pytest.raises(StateError, match="not a server's checkpoint"):
        started(checkpoint=tmp_path / "checkpoint")


def test_closing_lets_a_step_go_that_waits_for_room_in_the_log(tmp_path: Path) -> None:
    server = started(checkpoint=tmp_path / "checkpoint", every=1e6)
    trainer = joined(server, log_bytes=1)
    server._hub.saving.durable.save = lambda *_, **__: (_ for _ in ()).throw(OSError("full"))  # type: ignore[union-attr, method-assign]
    ends: list[str] = []

    def train() -> None:
        try:
            for gradient in gradients(5):
                trainer.model.give(gradient)  # type: ignore[operator]
                trainer.step()
        except ServerError as error:
            ends.append(str(error))

    stuck = threading.Thread(target=train, daemon=True)
    stuck.start()
    time.sleep(0.5)
    trainer.close()
    stuck.join(10)
    assert not stuck.is_alive()
    assert "closed" in ends[0]
    crash(server)


def test_a_recipe_serves_one_trainer_at_a_time() -> None:
    server, recipe = started(), recipes.topk(density=0.05, minimum_size=10)
    first = joined(server, recipe)
    with pytest.raises(ValueError, match="in use by another trainer"):
        joined(server, recipe)
    first.close()
    joined(server, recipe)


def test_strangers_do_not_keep_trainers_out() -> None:
    server = started()
    host, port = server.address.split(":")
    strangers = [socket.create_connection((host, int(port))) for _ in range(500)]
    for each in strangers[::2]:  # these say what looks like a beginning
        each.send(bytes.fromhex("ff00000000000000017f0300") + b"CURVE".ljust(20, bytes(1)))
    assert joined(server).step()  # none of them has been given up yet
    assert connections(server.address) > 400
    for each in strangers:
        each.close()


def test_a_trainer_that_is_closed_again_leaves_later_ones_alone() -> None:
    server, recipe, model = started(), thresholded(), Vector()
    first = joined(server, recipe, model)
    first.close()
    second = joined(server, recipe, model)
    model.give(gradients(1)[0])
    second.step()
    first.close()
    assert waiting(recipe).any()
    with pytest.raises(ValueError, match="in use by another"):
        joined(server, recipe)


def _leaving_with_seven(server: Server, recipe: Reducer, **options: Any) -> tuple[Trainer, Future[None]]:
    """Return a trainer that has sent as many updates as it may, and waits to send three more before it leaves."""
    trainer = joined(server, recipe, in_flight=9, **options)
    for gradient in gradients(WINDOW + 3):
        trainer.model.give(gradient)  # type: ignore[operator]
        trainer.step()
    (channel,), left = trainer._channels, Future[None]()
    assert soon(lambda: channel._waiting == WINDOW)

    def leave() -> None:
        try:
            trainer.close()
            left.set_result(None)
        except ServerError as error:
            left.set_exception(error)

    threading.Thread(target=leave, daemon=True).start()
    assert soon(lambda: channel._goodbye is not None)
    return trainer, left


def test_a_connection_that_breaks_while_a_trainer_leaves_costs_no_update_and_no_wait() -> None:
    server = started(recipe=dense(), make_optimizer=Busy, timeout=600.0)
    (busy,) = server._hub.central.optimizers
    assert isinstance(busy, Busy)
    _, left = _leaving_with_seven(server, dense(), reconnect=60.0)
    cut(server)
    busy.done.set()
    left.result(60)
    assert server.wait(30)
    assert list(server.status().updates.values()) == [WINDOW + 3]


def test_a_trainer_that_cannot_hand_over_its_last_updates_says_how_many() -> None:
    server, recipe = started(trainers=2), thresholded()
    trainer, left = _leaving_with_seven(server, recipe)
    server.close()
    with pytest.raises(ServerError, match=rf"has not confirmed the last {WINDOW + 3} updates.*pass reconnect="):
        left.result(30)
    trainer.close()  # it has been said
    assert joined(started(), recipe, trainer.model)  # both are free


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_trainers_that_lose_different_servers_do_not_wait_for_each_other(staleness: int) -> None:
    options: dict[str, Any] = {"servers": 2, "trainers": 3, "staleness": staleness}
    servers = [started(recipe=dense(), index=i, **options) for i in range(2)]
    where: dict[str, Any] = {
        "address": [each.address for each in servers],
        "ticket": [each.ticket for each in servers],
        "servers": 2,
    }
    trainers = [joined(servers[0], dense(), reconnect=60.0, **where) for _ in range(3)]

    hubs, pool = [server._hub for server in servers], ThreadPoolExecutor(3)
    names = [each._channels[0]._settings.trainer for each in trainers]

    def train(number: int) -> Future[None]:
        def steps() -> None:
            for gradient in gradients(6):
                trainers[number].model.give(gradient)  # type: ignore[operator]
                trainers[number].step()

        return pool.submit(steps)

    @contextmanager
    def lost() -> Iterator[None]:
        """The first trainer loses the second server, and the second the first, until the end."""
        with ExitStack() as away:
            for trainer, name, hub in zip(trainers[:2], names, reversed(hubs), strict=False):
                away.enter_context(trainer._channels[0]._shared.turn)
                with hub.lock:
                    hub.sessions[name].end("lost")
            yield
        assert soon(lambda: all(len(hub.sessions) == 3 for hub in hubs))

    with lost():
        going = [train(number) for number in range(3)]
        assert soon(lambda: all(hub.central.applied.get(names[2]) for hub in hubs))
    for each in going:
        each.result(60)
    going = [train(number) for number in range(2)]
    assert soon(lambda: all(hub.sessions[name].busy for hub in hubs for name in names[:2]))
    with lost():
        pass
    going.append(train(2))
    for each in going:
        each.result(60)
    assert [set(hub.central.applied.values()) for hub in hubs] == [{12}, {12}]


@pytest.mark.parametrize("restarts", [True, False])
def test_nobody_waits_for_a_trainer_that_is_new_to_a_server_which_the_others_have_lost(
    restarts: bool, tmp_path: Path
) -> None:
    shared: dict[str, Any] = {"servers": 2, "staleness": 1, "every": 1e6}
    options = [shared | {"index": i, "checkpoint": tmp_path / f"{i}"} for i in (0, 1)]
    servers = [started(recipe=dense(), **each) for each in options]
    where: dict[str, Any] = {"address": [each.address for each in servers], "servers": 2}
    old = joined(servers[0], dense(), reconnect=60.0, **where)
    for gradient in gradients(9):
        old.model.give(gradient)  # type: ignore[operator]
        old.step()
    servers[0].save()
    (name, pace) = (old._channels[0]._settings.trainer, old._channels[0]._shared)
    with pace.turn:  # so that the new one comes first
        if restarts:
            crash(servers[0])
            servers[0] = started(recipe=dense(), address=servers[0].address, **options[0])
        else:
            cut(servers[0])
        assert soon(lambda: not servers[0]._hub.sessions)
        new = joined(servers[0], dense(), **where)
    assert soon(lambda: all(name in server._hub.sessions for server in servers))
    assert [set(server._hub.rule.live.values()) for server in servers] == [{9}, {9}]
    new.model.give(gradients(1)[0])  # type: ignore[operator]
    with ThreadPoolExecutor(2) as pool:  # neither may be ahead by one
        assert all(pool.map(Trainer.step, (new, old)))


def _of_two(**options: Any) -> tuple[list[Server], Trainer]:
    servers = [started(recipe=dense(), servers=2, index=i, **options) for i in range(2)]
    where = [each.address for each in servers]
    return servers, joined(servers[0], dense(), address=where, servers=2, reconnect=60.0 * (options == {}))


def test_a_step_that_waits_for_one_server_hears_that_another_is_gone() -> None:
    servers, trainer = _of_two(trainers=2)  # of which one never comes
    trainer.model.give(gradients(1)[0])  # type: ignore[operator]
    stepping = ThreadPoolExecutor(1).submit(trainer.step)
    assert soon(lambda: all(each.busy for server in servers for each in server._hub.sessions.values()))
    servers[1].close()
    with pytest.raises(ServerError, match=f"{servers[1].address} is gone"):
        stepping.result(20)


def test_leaving_without_a_goodbye_waits_for_no_servers_turn() -> None:
    servers, trainer = _of_two()
    with servers[0]._hub.lock:  # as during a long step
        cut(servers[0])
        assert soon(trainer._channels[0]._shared.turn.locked)
        cut(servers[1])
        assert soon(lambda: not trainer._channels[1]._joined)
        closing = threading.Thread(target=trainer.close, kwargs={"goodbye": False}, daemon=True)
        closing.start()
        closing.join(20)
        assert not closing.is_alive()


def test_a_server_says_where_it_is_before_it_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    said = list[str]()
    monkeypatch.setattr("thinwire.server.server.announce", lambda what, *_: said.append(what))
    monkeypatch.setattr(Layout, "compile", lambda _: said.append("compile"))
    started()
    assert said == ["address", "compile"]


def test_a_trainer_compiles_before_it_waits_for_a_servers_address(monkeypatch: pytest.MonkeyPatch) -> None:
    def waited(*_: object) -> None:
        raise ServerError(f"{len(compiled)} compiled")

    compiled = list[bool]()
    monkeypatch.setattr("thinwire.trainer.trainer.addresses", waited)
    monkeypatch.setattr(Layout, "compile", lambda _: compiled.append(True))
    with pytest.raises(ServerError, match="1 compiled"):
        connect(Vector(), dense())


@pytest.mark.parametrize("gone", [True, False])
def test_closing_does_not_wait_for_a_server_that_is_gone_or_fails(gone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    server = started()
    trainer = joined(server, reconnect=600.0)
    monkeypatch.setattr(Session, "take", lambda session, _: session.end("the server has failed", Flag.FINAL))
    if gone:
        server.close()
        time.sleep(0.5)
    closing = threading.Thread(target=trainer.close, daemon=True)
    closing.start()
    closing.join(10)
    assert not closing.is_alive()


def test_a_server_waits_until_those_who_leave_know_that_all_has_arrived() -> None:
    server, passing = started(Vector(100_000), thresholded(0.001)), threading.Event()
    passing.set()
    slow = Proxy(server.address, lambda data: data if len(data) < PIECE // 8 or passing.wait(30) else b"")
    options = {"address": slow.address, "ticket": server.ticket, "in_flight": 1}
    trainer = joined(server, thresholded(0.001), Vector(100_000), **options)
    trainer.model.give(torch.arange(1e5, dtype=torch.float64))  # type: ignore[operator]
    passing.clear()  # from now on, no parameters
    assert trainer.step()
    leaving = ThreadPoolExecutor(1).submit(trainer.close)
    assert soon(lambda: bool(server.status().updates) and not server.status().trainers)
    early = server.wait(0.5)
    passing.set()
    assert not early
    assert server.wait(20)
    leaving.result(20)


def test_leaving_without_a_goodbye_waits_for_nobody() -> None:
    trainer = joined(started(trainers=2), in_flight=9)
    trainer.model.give(gradients(1)[0])  # type: ignore[operator]
    for _ in range(WINDOW + 2):  # which wait for another trainer
        trainer.step()
    closing = threading.Thread(target=trainer.close, kwargs={"goodbye": False}, daemon=True)
    closing.start()
    closing.join(10)
    assert not closing.is_alive()


def test_leaving_without_a_goodbye_waits_for_no_update_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thinwire.wire.sockets._QUEUED", 1)
    server, passing = started(Vector(10**6), dense(), timeout=600.0), threading.Event()
    slow = Proxy(server.address, lambda data: data if len(data) < PIECE // 8 or passing.wait(60) else b"")
    where: dict[str, Any] = {"address": slow.address, "ticket": server.ticket, "timeout": 600.0}
    passing.set()
    trainer = joined(server, dense(), Vector(10**6), **where)
    passing.clear()
    trainer.model.give(torch.ones(10**6, dtype=torch.float64))  # type: ignore[operator]
    step = ThreadPoolExecutor(1).submit(trainer.step)
    (channel,) = trainer._channels
    assert soon(lambda: not channel._queue and channel._waiting == 1)
    closing = ThreadPoolExecutor(1).submit(trainer.close, goodbye=False)
    try:
        closing.result(20)
    finally:
        passing.set()
    with pytest.raises(ServerError, match="was closed"):
        step.result(20)


def test_a_trainer_that_was_killed_and_came_back_is_one() -> None:
    server = started(trainers=2)
    joined(server).close(goodbye=False)
    assert soon(lambda: not server.status().trainers)
    trainer = joined(server)
    trainer.model.give(gradients(1)[0])  # type: ignore[operator]
    step = threading.Thread(target=trainer.step, daemon=True)
    step.start()
    step.join(1)
    assert step.is_alive()
    assert server.status().version == 0
    joined(server)
    step.join(10)
    assert server.status().version == 1


def test_wait_ends_when_the_server_is_closed() -> None:
    server, found = started(), list[bool]()
    waits = threading.Thread(target=lambda: found.append(server.wait()), daemon=True)
    waits.start()
    server.close()
    waits.join(20)
    assert found == [False]


def test_wait_does_not_end_before_anything_was_trained() -> None:
    first, model = started(servers=2, index=0, timeout=0.5), Vector()
    torch.nn.init.ones_(model.large)
    with pytest.raises(ServerError, match="start it first"):
        joined(first, model=model, address=[first.address, "127.0.0.1:9"], servers=2)
    assert not first.wait(1.5)
    assert model.large.eq(1).all()  # and whoever is refused keeps its parameters


def test_wait_gives_trainers_time_to_come_back_after_a_restart(tmp_path: Path) -> None:
    server = started(checkpoint=tmp_path / "checkpoint")
    with joined(server) as trainer:
        trainer.model.give(gradients(1)[0])  # type: ignore[operator]
        trainer.step()
    server.close()
    again = started(checkpoint=tmp_path / "checkpoint", timeout=2.0)
    assert not again.wait(0.5)
    assert again.wait(10)


def test_trainers_have_their_time_after_a_restart_that_compiles_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, clock, late = tmp_path / "checkpoint", time.monotonic, [0.0]
    with started(checkpoint=path) as server, joined(server) as trainer:
        trainer.step()
    monkeypatch.setattr(time, "monotonic", lambda: clock() + late[0])
    monkeypatch.setattr(Layout, "compile", lambda _: late.__setitem__(0, 100.0))
    assert not started(checkpoint=path, staleness=0).wait(0.0)


def test_two_servers_with_one_checkpoint_are_told(tmp_path: Path) -> None:
    servers = [started(servers=2, index=i, checkpoint=tmp_path / "checkpoint", every=1e6) for i in range(2)]
    servers[0].save()
    with pytest.raises(FileExistsError, match="a checkpoint of its own"):
        servers[1].save()
    crash(servers[1])


def test_rows_without_elements_are_refused() -> None:
    with pytest.raises(ValueError, match=r"0.weight is \(9, 0\) and has no elements"):
        started(nn.Sequential(nn.Embedding(9, 0, sparse=True), nn.Linear(2, 2)))


@pytest.mark.slow
def test_many_messages_of_a_peer_that_is_gone_end_no_server() -> None:
    steps: list[Busy] = []

    def made(parameters: Any) -> Busy:
        steps.append(Busy(parameters))
        return steps[0]

    server, gradient = started(make_optimizer=made), gradients(1)[0]
    first, other = Raw(server.address), Raw(server.address, join=False)
    other.send(Kind.WATCH)
    other.receive()
    first.send(Kind.UPDATE, *first.body(1, gradient), number=1)
    assert steps[0].begun.wait(10)
    for _ in range(400):  # more than calls may nest
        other.send(Kind.WATCH)
    time.sleep(1.0)  # so that they leave; without, the test passes whatever the server does
    other.link.close()
    time.sleep(1.0)
    steps[0].done.set()
    assert first.receive()
    assert not soon(lambda: bool(server._hub.central.failure), seconds=2.0)


def _flood(raw: Raw, frames: int, *body: bytes) -> None:
    """Send so many updates, without reading."""
    for _ in range(frames):
        raw.send(Kind.UPDATE, *body, number=1)


def test_a_flood_of_updates_that_have_to_wait_is_cut_off() -> None:
    server = started(trainers=2)
    raw = Raw(server.address)
    _flood(raw, 100, *raw.body(1, gradients(1)[0]))
    with pytest.raises(GoneError, match=f"6 unanswered requests; expected at most {WINDOW}"):
        raw.receive()
    assert joined(server)


def test_nobody_is_answered_who_does_not_take_the_answers() -> None:
    hub, talk = started()._hub, Talk({})
    talk.say(Kind.WATCH)
    (question,) = talk.outbox
    with hub.lock:
        session = Session(hub, b"peer", "here")
        for number in range(WINDOW + 2):
            session.take(numbered(question, number))
        assert len(session.talk.outbox) == 1
        with pytest.raises(FrameError, match=f"expected at most {WINDOW}"):
            session.take(numbered(question, WINDOW + 2))


def test_a_flood_waits_outside_while_the_server_computes() -> None:
    server = started(make_optimizer=Busy, timeout=1.0)
    (busy,) = server._hub.central.optimizers
    assert isinstance(busy, Busy)
    raw = Raw(server.address)
    raw.send(Kind.UPDATE, *raw.body(1, gradients(1)[0]), number=1)
    assert busy.begun.wait(20)
    with pytest.raises(GoneError):  # nothing more is read, not even heartbeats
        _flood(raw, 4000, bytes(PIECE))
    busy.done.set()
    assert raw.link.talk.counted[0] < 1000 * PIECE
    assert joined(server).step()


STRANGERS = """
import socket, sys
found = [socket.create_connection(("127.0.0.1", int(sys.argv[1]))) for _ in range(40)]
print(flush=True)
sys.stdin.read()
"""


def _busy_threads() -> list[Path]:
    """Return the threads of this process in which libzmq sends and receives."""
    return [each for each in Path("/proc/self/task").iterdir() if "ZMQbg/IO" in (each / "comm").read_text()]


def _sleeps(status: TextIO) -> int:
    """Return how often a thread has waited for something."""
    status.seek(0)
    return int(status.read().split("\nvoluntary_ctxt_switches:")[1].split()[0])


def test_without_descriptors_a_server_goes_on_and_does_not_spin(tmp_path: Path) -> None:
    server = started(checkpoint=tmp_path / "checkpoint", every=1e6)
    assert soon(lambda: len(_busy_threads()) == 1)  # it names itself when it begins
    (task,) = _busy_threads()
    trainer, port, limits = joined(server), server.address.split(":")[1], resource.getrlimit(resource.RLIMIT_NOFILE)
    status = (task / "status").open()
    trainer.model.give(gradients(1)[0])  # type: ignore[operator]
    assert trainer.step()  # now nothing more is loaded
    strangers = subprocess.Popen(
        [sys.executable, "-c", STRANGERS, port], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(list(Path("/proc/self/fd").iterdir())) + 5, limits[1]))
    try:
        assert strangers.stdout is not None
        assert strangers.stdout.readline()
        before = _sleeps(status)
        assert soon(lambda: _sleeps(status) > before + 5)
        assert trainer.step()
        with pytest.raises(OSError, match="Too many open files"):
            server.save()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        strangers.communicate("")
        status.close()
    server.save()
    assert joined(server).step()

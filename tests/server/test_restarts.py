"""What becomes of trainers, updates and checkpoints when connections break and servers start again."""

import math
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from served import (
    NUMEL,
    Vector,
    closed,
    crash,
    cut,
    dense,
    gradients,
    joined,
    soon,
    started,
    swapped,
    thresholded,
    waiting,
)
from torch import Tensor, nn

from thinwire import codecs, recipes
from thinwire.errors import ServerError, StateError
from thinwire.memories.staged import Staged
from thinwire.server import Server, Trainer
from thinwire.server.saving import Durable
from thinwire.trainer.channel import Channel
from thinwire.wire import rendezvous
from thinwire.wire.frames import GoneError
from thinwire.wire.layout import Part
from thinwire.wire.sockets import Link

__all__ = ["closed"]


def _train(trainer: Trainer, some: Sequence[Tensor]) -> None:
    for gradient in some:
        trainer.model.give(gradient)  # type: ignore[operator]
        trainer.step()


def _step_in_vain(trainer: Trainer) -> None:
    with pytest.raises(ConnectionError):
        trainer.step()


def _in_threads(*jobs: Callable[[], None]) -> None:
    threads = [threading.Thread(target=job, daemon=True) for job in jobs]
    for each in threads:
        each.start()
    for each in threads:
        each.join(40)
    assert not any(each.is_alive() for each in threads)


@pytest.mark.slow
def test_many_threads_catch_up_and_each_loss_has_its_own_patience() -> None:
    server = started()
    trainer, stop = joined(server, reconnect=5.0, in_flight=2), threading.Event()
    (channel,) = trainer._channels

    def work(module: nn.Module) -> None:
        while not stop.is_set():
            module.give(torch.randn(200, dtype=torch.float64))  # type: ignore[operator]
            trainer.step(module)

    running = threading.Thread(target=trainer.run, args=(work,), kwargs={"threads": 4}, daemon=True)
    running.start()
    for joins in range(2, 5):
        time.sleep(2.0)
        cut(server)
        assert soon(lambda joins=joins: len(channel._floors) >= joins and channel._sound)  # type: ignore[misc]
    stop.set()
    running.join(20)
    assert not running.is_alive()
    assert trainer.settle(10)
    assert list(server.status().updates.values()) == [trainer.traffic().updates]


def test_synchronous_trainers_that_come_back_one_after_the_other_stay_in_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"checkpoint": tmp_path / "checkpoint", "every": 1e6, "trainers": 2, "staleness": 0}
    server = started(recipe=dense(), **options)
    both = [joined(server, dense(), reconnect=60.0) for _ in range(2)]
    theirs = [gradients(10, seed=seed) for seed in (1, 2)]
    _in_threads(*(lambda t=t, g=g: _train(t, g[:2]) for t, g in zip(both, theirs, strict=True)))
    server.save()
    _in_threads(*(lambda t=t, g=g: _train(t, g[2:6]) for t, g in zip(both, theirs, strict=True)))
    crash(server)
    late, call, begin = both[1]._channels[0], Channel._called, time.monotonic()

    def one_late(channel: Channel) -> Link:
        if channel is late and time.monotonic() < begin + 1.5:
            raise GoneError("not yet")
        return call(channel)

    monkeypatch.setattr(Channel, "_called", one_late)
    again = started(recipe=dense(), address=server.address, **options)
    _in_threads(*(lambda t=t, g=g: _train(t, g[6:]) for t, g in zip(both, theirs, strict=True)))
    assert again.status().version == 10
    mean = (sum(theirs[0]) + sum(theirs[1])) / 2
    torch.testing.assert_close(again._hub.central.parameters["large"].detach(), -mean)


def test_a_trainer_that_never_comes_back_is_waited_for_no_longer_than_the_timeout(tmp_path: Path) -> None:
    options: dict[str, Any] = {"checkpoint": tmp_path / "checkpoint", "trainers": 2, "staleness": 0, "timeout": 2.0}
    server = started(recipe=dense(), **options)
    both = [joined(server, dense()) for _ in range(2)]
    _in_threads(*(lambda t=t: _train(t, gradients(1)) for t in both))
    server.save()
    crash(server)
    again = started(recipe=dense(), **options)
    _train(joined(again, dense()), gradients(1))
    assert again.status().version == 2
    assert again._hub.central.present == again.status().trainers.keys()  # and it is not when this one starts again


def test_a_server_that_is_closed_before_training_begins_applies_nothing(tmp_path: Path) -> None:
    server = started(trainers=2, checkpoint=tmp_path / "checkpoint")
    trainer = joined(server)
    trainer.model.give(gradients(1)[0])  # type: ignore[operator]
    step = threading.Thread(target=_step_in_vain, args=(trainer,), daemon=True)
    step.start()
    time.sleep(0.5)
    server.close()
    step.join(10)
    again = started(trainers=2, checkpoint=tmp_path / "checkpoint")
    assert again.status().version == 0
    assert not again._hub.rule.complete


def test_staleness_counts_from_what_the_server_went_back_to(tmp_path: Path) -> None:
    options: dict[str, Any] = {"checkpoint": tmp_path / "checkpoint", "every": 1e6}
    server = started(recipe=dense(), **options)
    one, other = (joined(server, dense(), reconnect=60.0) for _ in range(2))
    _train(one, gradients(1))
    server.save()
    _train(other, gradients(5))
    _train(one, gradients(1))  # its next update will be computed on version 7
    crash(server)
    again = started(recipe=dense(), address=server.address, **options)
    _train(other, gradients(20))
    assert soon(lambda: sorted(again.status().updates.values()) == [2, 25])  # what was lost has come again
    one.model.give(gradients(1)[0])  # type: ignore[operator]
    before = again.status().staleness
    assert one.step()
    (stale,) = {s for s, n in again.status().staleness.items() if n > before.get(s, 0)}
    assert stale > 20  # it began before the server went back


def test_rates_of_numpy_are_saved_and_read_back(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "checkpoint": tmp_path / "checkpoint",
        "make_scheduler": lambda each: torch.optim.lr_scheduler.LambdaLR(each, lambda step: np.exp(-step / 10)),
    }
    server = started(**options)
    _train(joined(server), gradients(3))
    rates = [group["lr"] for group in server._hub.central.optimizers[0].param_groups]
    server.close()
    assert [g["lr"] for g in started(**options)._hub.central.optimizers[0].param_groups] == rates


def _warming(optimizer: torch.optim.Optimizer) -> Any:
    """Half the rate for a step, then all of it, and from the fourth on halved each time."""
    schedulers = torch.optim.lr_scheduler
    warming = schedulers.ConstantLR(optimizer, factor=0.5, total_iters=1)
    return schedulers.SequentialLR(optimizer, [warming, schedulers.LambdaLR(optimizer, lambda i: 0.5 ** (i + 1))], [3])


@pytest.mark.parametrize(
    ("schedule", "moved"),
    [
        (None, [1.0, 1.0, 0.25, 0.25]),
        (_warming, [0.5, 1.0, 0.25, 0.125]),
        (partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5), [1.0, 0.5, 0.0625, 0.03125]),
        (partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda step: 0.5**step), [1.0, 0.5, 0.0625, 0.03125]),
    ],
)
def test_a_server_that_is_started_again_with_another_learning_rate_takes_it(
    schedule: Callable[..., Any] | None, moved: list[float], tmp_path: Path
) -> None:
    found = list[float]()
    for rate in (1.0, 1.0, 0.25, 0.25):
        options: dict[str, Any] = {"make_optimizer": partial(torch.optim.SGD, lr=rate), "make_scheduler": schedule}
        with (
            started(central := Vector(), dense(), checkpoint=tmp_path / "server.pt", **options) as server,
            joined(server, dense(), model := Vector()) as trainer,
        ):
            before = float(central.large.detach()[0])
            model.give(torch.ones(NUMEL, dtype=torch.float64))
            trainer.step()
            found.append(before - float(central.large.detach()[0]))
    assert found == moved


def test_the_checkpoint_of_another_scheduler_is_refused(tmp_path: Path) -> None:
    path, schedulers = tmp_path / "checkpoint", torch.optim.lr_scheduler
    halving = partial(schedulers.StepLR, step_size=1, gamma=0.5)
    for saved, here, said in (
        (_warming, halving, r"SequentialLR\(ConstantLR, LambdaLR\), and make_scheduler makes a StepLR"),
        (halving, partial(schedulers.LambdaLR, lr_lambda=float), "StepLR, and make_scheduler makes a LambdaLR"),
    ):
        path.unlink(missing_ok=True)
        started(make_scheduler=saved, checkpoint=path).close()
        before = path.read_bytes()
        with pytest.raises(StateError, match=f"scheduler {said}: pass the make_scheduler that it was saved with"):
            started(make_scheduler=here, checkpoint=path)
        assert path.read_bytes() == before


def test_a_checkpoint_without_names_of_schedulers_is_read(tmp_path: Path) -> None:
    options: dict[str, Any] = {"make_scheduler": _warming, "checkpoint": tmp_path / "checkpoint"}
    started(**options).close()
    saved = torch.load(options["checkpoint"])
    del saved["schedules"]
    torch.save(saved, options["checkpoint"])
    started(**options).close()


@pytest.mark.parametrize("saved", [torch.optim.SGD, torch.optim.Adam, torch.optim.RMSprop, "two groups"])
def test_the_checkpoint_of_another_optimizer_is_refused(saved: Any, tmp_path: Path) -> None:
    def of_two(parameters: Sequence[Tensor]) -> torch.optim.Optimizer:
        return torch.optim.Adagrad([{"params": [p]} for p in parameters])

    path = tmp_path / "checkpoint"
    started(make_optimizer=of_two if saved == "two groups" else saved, checkpoint=path).close()
    with pytest.raises(StateError, match=r"another optimizer than this Adagrad.*use the optimizer it was saved with"):
        started(make_optimizer=torch.optim.Adagrad, checkpoint=path)


def test_a_checkpoint_of_parameters_in_another_order_is_refused(tmp_path: Path) -> None:
    make = partial(torch.optim.SGD, lr=0.1, momentum=0.9)  # whose state goes by the order
    started(checkpoint=tmp_path / "server.pt", make_optimizer=make).close()
    with pytest.raises(StateError, match="the order of parameters is parameter large in the checkpoint and"):
        started(swapped(), checkpoint=tmp_path / "server.pt", make_optimizer=make)


@pytest.mark.parametrize("down", [None, codecs.TopK(density=1.0)])
def test_parameters_stay_as_they_are_between_steps_while_a_trainer_joins_again(down: codecs.Codec | None) -> None:
    server = started(recipe=dense(), down=down)
    trainer, other = (joined(server, dense(), reconnect=30.0, down=down) for _ in range(2))
    (channel,) = trainer._channels
    _train(trainer, gradients(1))
    before, base = trainer.model.get_parameter("large").clone(), channel.copy.base
    cut(server)
    assert soon(lambda: len(channel._floors) == 2)
    _train(other, gradients(3))
    cut(server)
    assert soon(lambda: len(channel._floors) == 3)
    assert torch.equal(trainer.model.get_parameter("large"), before)
    assert channel.copy.base == base
    _train(trainer, gradients(1))
    assert torch.equal(trainer.model.get_parameter("large"), server._hub.central.parameters["large"])
    assert server.status().staleness == {0: 3, 1: 1, 3: 1}


def test_updates_that_are_sent_once_more_are_answered_in_brief(tmp_path: Path) -> None:
    options: dict[str, Any] = {"checkpoint": tmp_path / "checkpoint", "every": 1e6}
    server = started(recipe=dense(), **options)
    trainer = joined(server, dense(), reconnect=60.0)
    _train(trainer, gradients(1))
    one = trainer.traffic().received_bytes // 2  # a welcome, and an answer
    _train(trainer, gradients(20))
    before = trainer.traffic().received_bytes
    crash(server)
    again = started(recipe=dense(), address=server.address, **options)
    _train(trainer, gradients(1))
    assert list(again.status().updates.values()) == [22]
    assert trainer.traffic().received_bytes - before < 10 * one
    assert torch.equal(trainer.model.get_parameter("large"), again._hub.central.parameters["large"])


class Odd(torch.optim.SGD):
    """Keeps in its state what a checkpoint cannot give back."""

    def state_dict(self) -> dict[str, object]:
        return super().state_dict() | {"odd": threading.local}


def test_a_state_that_cannot_be_read_back_is_never_taken_for_saved(tmp_path: Path) -> None:
    server = started(make_optimizer=lambda some: Odd(some, lr=0.1), checkpoint=tmp_path / "checkpoint", every=1e6)
    trainer = joined(server)
    _train(trainer, gradients(1))
    with pytest.raises(OSError, match="cannot be read back"):
        server.save()
    assert trainer.traffic().saved == 0
    assert {each.name for each in tmp_path.iterdir()} == {"checkpoint.key", "checkpoint.key.ticket"}
    crash(server)


def test_a_file_that_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    path.write_bytes(b"garbage" * 100)
    with pytest.raises(StateError, match="not a server's checkpoint"):
        started(checkpoint=path)


def test_no_flipped_bit_is_taken_for_a_value(tmp_path: Path) -> None:
    path, found = tmp_path / "checkpoint", dict[str, Any]()
    server = started(make_optimizer=torch.optim.Adam, checkpoint=path, every=1e6)
    _train(joined(server), gradients(1))
    server.close()
    Durable(path).load(found.update)
    right, sound, chance, refused = str(found), path.read_bytes(), random.Random(0), 0
    for _ in range(200):
        data, place = bytearray(sound), chance.randrange(len(sound))
        data[place] ^= 1 << chance.randrange(8)
        path.write_bytes(data)
        try:
            Durable(path).load(found.update)
        except StateError:
            refused += 1
        else:
            assert str(found) == right  # it was in some padding
    assert refused > 100


def test_the_previous_checkpoint_is_one_on_which_gradients_were_finite(tmp_path: Path) -> None:
    path, version = tmp_path / "checkpoint", list[int]()
    server = started(checkpoint=path, every=1e6)
    trainer = joined(server)
    for _ in range(2):
        _train(trainer, gradients(1))
        server.save()
    server.save()
    for name in ("checkpoint", "checkpoint.previous"):
        Durable(tmp_path / name).load(lambda saved: version.append(saved["version"]))
    assert version == [2, 1]  # nobody has computed gradients on 2
    server.close()
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(StateError, match=r"put .*checkpoint.previous, which is the one before it, in its place, or"):
        started(checkpoint=path)


@pytest.mark.parametrize(("path", "error"), [("no/such/folder", FileNotFoundError), (".", IsADirectoryError)])
def test_a_checkpoint_that_cannot_be_written_is_found_out_at_once(
    path: str, error: type[OSError], tmp_path: Path
) -> None:
    with pytest.raises(error, match="checkpoint"):
        started(checkpoint=tmp_path / path)


def test_a_rename_that_fails_and_a_touch_do_not_end_saving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "checkpoint"
    server = started(checkpoint=path, every=1e6)
    server.save()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError("no")))
        with pytest.raises(OSError, match="no"):
            server.save()
    server.save()
    os.utime(path)
    server.save()


def test_a_link_to_a_checkpoint_stays_one_and_drafts_of_killed_servers_go(tmp_path: Path) -> None:
    link, drafts = tmp_path / "server.pt", [tmp_path / "real.pt.1234.new", tmp_path / "real.pt.mine.new"]
    link.symlink_to("real.pt")
    for each in drafts:
        each.touch()
    with started(checkpoint=link) as server:
        server.save()
    assert link.is_symlink()
    assert [each.exists() for each in (tmp_path / "real.pt", *drafts)] == [True, False, True]


def test_an_update_that_has_no_room_in_the_log_has_the_server_save(tmp_path: Path) -> None:
    server = started(checkpoint=tmp_path / "checkpoint", every=1e6)
    trainer = joined(server, log_bytes=1900)
    _train(trainer, gradients(2))
    _in_threads(trainer.drain)  # uncompressed, it is larger than what is left of the log
    assert list(server.status().updates.values()) == [3]


@pytest.mark.parametrize("in_flight", [0, 9])
def test_settling_has_the_server_save_so_that_others_need_not_wait(in_flight: int, tmp_path: Path) -> None:
    server = started(checkpoint=tmp_path / "checkpoint", every=1e6)
    trainer = joined(server, in_flight=in_flight)
    _train(trainer, gradients(9))
    assert trainer.settle(20)
    assert trainer.traffic().saved == 9


@pytest.mark.parametrize("wait", [lambda trainer: trainer.settle(20.0), lambda trainer: trainer.drain() or True])
def test_a_server_that_starts_again_meanwhile_saves_what_is_waited_for(
    wait: Callable[[Trainer], bool], tmp_path: Path
) -> None:
    options: dict[str, Any] = {"checkpoint": tmp_path / "checkpoint", "every": 1e6}
    server, found = started(**options), list[bool]()
    trainer = joined(server, log_bytes=1900, reconnect=60.0)  # too few for what is drained
    _train(trainer, gradients(2))
    crash(server)

    def start_again() -> None:
        started(address=server.address, **options)

    _in_threads(lambda: found.append(wait(trainer)), start_again)
    assert found == [True]


def test_years_of_patience_are_as_good_as_endless(tmp_path: Path) -> None:
    trainer = joined(started(checkpoint=tmp_path / "server.pt", every=1e12))
    assert trainer.step()
    assert trainer.settle(math.inf)


def test_settling_does_not_wait_for_what_other_threads_send_meanwhile(tmp_path: Path) -> None:
    trainer = joined(started(checkpoint=tmp_path / "server.pt", every=1000.0))
    settled = threading.Event()

    def go_on() -> None:
        while not settled.is_set():
            trainer.step()

    with ThreadPoolExecutor(1) as pool:
        pool.submit(go_on)
        try:
            assert soon(lambda: trainer.traffic().updates > 10, 20.0)
            assert trainer.settle(10.0)
        finally:
            settled.set()


def test_a_checkpoint_stays_where_it_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    server = started(checkpoint="server.pt")
    (elsewhere := tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(elsewhere)
    server.close()
    assert (tmp_path / "server.pt").exists()
    assert not [*elsewhere.iterdir()]


def test_settling_on_several_servers_takes_no_longer_than_told(monkeypatch: pytest.MonkeyPatch) -> None:
    servers, told = [started(servers=2, index=i) for i in range(2)], list[float]()
    trainer = joined(servers[0], address=[each.address for each in servers], servers=2)

    def settled(_: Channel, seconds: float) -> bool:
        told.append(seconds)
        return True

    monkeypatch.setattr(Channel, "settle", settled)
    assert trainer.settle(20.0)
    assert 20.0 >= told[0] > told[1]


def test_a_server_that_has_gone_far_back_does_not_hold_up_the_others_for_a_trainer_that_is_new() -> None:
    first, other, again = (started(recipe=dense(), servers=2, index=i, staleness=1) for i in (0, 1, 0))

    def paces(one: Server) -> list[list[int]]:
        return [[*each._hub.rule.live.values()] for each in (one, other)]

    with joined(first, dense(), address=[first.address, other.address], servers=2) as trainer:
        _train(trainer, gradients(20))
        assert paces(first) == [[20], [20]]
    newcomer = joined(again, dense(), address=[again.address, other.address], servers=2)
    assert soon(lambda: paces(again) == [[20], [20]])
    _train(newcomer, gradients(1))
    assert paces(again) == [[21], [21]]


@pytest.mark.parametrize("knows_the_first", [True, False])
def test_a_trainer_that_a_restarted_server_does_not_know_keeps_its_pace(knows_the_first: bool, tmp_path: Path) -> None:
    options: dict[str, Any] = {"checkpoint": tmp_path / "checkpoint", "every": 1e6, "staleness": 1}
    server = started(recipe=dense(), **options)
    old = joined(server, dense(), reconnect=60.0)
    _train(old, gradients(5))
    server.save()
    _train(old, gradients(4))
    new = joined(server, dense(), reconnect=60.0)
    _in_threads(*(lambda t=t: _train(t, gradients(3)) for t in (old, new)))
    first, late = (old, new) if knows_the_first else (new, old)
    name = first._channels[0]._settings.trainer
    with late._channels[0]._shared.turn:
        crash(server)
        again = started(recipe=dense(), address=server.address, **options)
        hub = again._hub
        assert soon(lambda: hub.central.applied.get(name) == 12 if knows_the_first else name in hub.sessions)
    assert soon(lambda: sorted(hub.central.applied.values()) == [3, 12])
    assert soon(lambda: [*hub.rule.live.values()] == [12, 12])  # counted after it is applied


@pytest.mark.parametrize("back", [2, 1])
def test_a_trainer_that_loses_all_its_servers_goes_on_with_all_of_them_or_raises(back: int, tmp_path: Path) -> None:
    shared: dict[str, Any] = {"servers": 2, "every": 1e6, "staleness": 1}
    options = [shared | {"index": i, "checkpoint": tmp_path / f"{i}"} for i in (0, 1)]
    servers = [started(recipe=dense(), **each) for each in options]
    where: dict[str, Any] = {
        "address": [each.address for each in servers],
        "servers": 2,
        "reconnect": 60.0 if back == 2 else 1.0,
    }
    trainer = joined(servers[0], dense(), in_flight=2, **where)
    _train(trainer, gradients(9))
    for each in servers:
        crash(each)
    again = [started(recipe=dense(), address=where["address"][i], **options[i]) for i in range(back)]
    if back == 1:
        with pytest.raises(ServerError, match="is gone"):
            _train(trainer, gradients(9))
        return
    _train(trainer, gradients(9))
    assert trainer.settle(20)
    assert [[*each.status().updates.values()] for each in again] == [[18], [18]]


def test_an_update_is_checked_for_all_servers_before_any_part_is_encoded() -> None:
    recipe = recipes.topk(density=0.5, minimum_size=0)
    servers = [started(recipe=recipes.topk(density=0.5, minimum_size=0), servers=2, index=i) for i in range(2)]
    trainer = joined(servers[0], recipe, address=[each.address for each in servers], servers=2)
    trainer.model.give(gradients(1)[0])  # type: ignore[operator]
    small = trainer.model.get_parameter("small")
    small.grad = torch.zeros(3, dtype=torch.float64).to_sparse()
    with pytest.raises(TypeError, match="small got a sparse gradient"):
        trainer.step()
    assert not waiting(recipe).any()
    assert [each.status().version for each in servers] == [0, 0]


def test_who_is_interrupted_while_the_log_is_full_goes_on(tmp_path: Path) -> None:
    server = started(checkpoint=tmp_path / "checkpoint", every=1e6)
    trainer, given = joined(server, log_bytes=1), gradients(4)
    save, waits = server._hub.saving.save, trainer._channels[0]._until
    server._hub.saving.save = lambda: None  # type: ignore[method-assign]
    _train(trainer, given[:1])

    def interrupted(enough: Callable[[], bool], seconds: float | None = None) -> None:
        if not enough():
            raise KeyboardInterrupt
        waits(enough, seconds)

    trainer._channels[0]._until = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        _train(trainer, given[1:2])
    trainer._channels[0]._until, server._hub.saving.save = waits, save  # type: ignore[method-assign]
    _train(trainer, given[2:])
    applied = -server._hub.central.parameters["large"].detach()
    torch.testing.assert_close(applied + waiting(trainer._recipe), torch.stack(given).sum(0))


@pytest.mark.parametrize("raised", [KeyboardInterrupt, MemoryError])
def test_who_is_interrupted_while_it_encodes_for_the_last_server_loses_nothing(
    raised: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipes.topk(density=0.05, minimum_size=2)
    servers = [started(recipe=recipes.topk(density=0.05, minimum_size=2), servers=2, index=i) for i in range(2)]
    trainer, given = joined(servers[0], recipe, address=[each.address for each in servers], servers=2), gradients(3)
    _train(trainer, given[:1])
    last = trainer._channels[1].uplink
    with monkeypatch.context() as patch:
        patch.setattr(last, "encode", lambda *_, **__: (_ for _ in ()).throw(raised))
        with pytest.raises(raised):
            _train(trainer, given[1:2])
    _train(trainer, given[2:])
    torch.testing.assert_close(waiting(recipe) - trainer.model.get_parameter("large").detach(), given[0] + given[2])


@pytest.mark.parametrize("torn", [(Staged, "commit"), (Channel, "send"), (Part, "write")])
def test_who_is_interrupted_when_half_is_done_tears_nothing(
    torn: tuple[type, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipes.topk(density=0.05, minimum_size=2)
    options: dict[str, Any] = {"servers": 2, "down": codecs.TopK(density=0.1)}
    servers = [started(recipe=recipes.topk(density=0.05, minimum_size=2), index=i, **options) for i in range(2)]
    trainer, given = joined(servers[0], recipe, address=[each.address for each in servers], **options), gradients(4)
    _train(trainer, given[:2])
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in the background ignores it
    try:
        with monkeypatch.context() as patch:
            patch.setattr(*torn, _then_interrupted(getattr(*torn)))
            with pytest.raises(KeyboardInterrupt):
                _train(trainer, given[2:3])
    finally:
        signal.signal(signal.SIGINT, handler)
    _train(trainer, [*given[3:], *torch.zeros(60, NUMEL, dtype=torch.float64)])  # until nothing waits
    (central,) = (found for each in servers if "large" in (found := each._hub.central.parameters))
    torch.testing.assert_close(-central["large"].detach(), torch.stack(given).sum(0))
    torch.testing.assert_close(trainer.model.get_parameter("large"), central["large"])


def _then_interrupted(call: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(*args: Any, **options: Any) -> Any:
        done = call(*args, **options)
        if threading.current_thread() is threading.main_thread():
            signal.raise_signal(signal.SIGINT)
        return done

    return wrapped


def test_what_waits_is_lost_when_a_trainer_is_closed() -> None:
    server, recipe = started(), thresholded()
    with joined(server, recipe) as trainer:
        _train(trainer, gradients(1))
        assert waiting(recipe).any()
    assert not waiting(recipe).any()


def test_a_trainer_killed_within_a_step_is_noticedsoon() -> None:
    server = started(trainers=2, timeout=30.0)
    trainer = joined(server)
    trainer.model.give(gradients(1)[0])  # type: ignore[operator]
    threading.Thread(target=_step_in_vain, args=(trainer,), daemon=True).start()
    time.sleep(0.5)
    trainer.close(goodbye=False)
    assert soon(lambda: not server.status().trainers, 5.0)


def test_a_second_server_of_a_process_wants_an_address_under_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")
    assert rendezvous.place(None, 1, None) == 0
    monkeypatch.setattr("thinwire.wire.rendezvous._announced", {0})
    with pytest.raises(ValueError, match="pass address="):
        rendezvous.place(None, 1, None)


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 1, None])
def test_sums_survive_servers_that_end_unsaved_again_and_again(staleness: int | None, tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "checkpoint": tmp_path / "checkpoint", "every": 0.2, "trainers": 2, "staleness": staleness, "timeout": 4.0
    }  # fmt: skip
    server = started(recipe=dense(), **options)
    address = server.address
    both = [joined(server, dense(), reconnect=60.0, timeout=4.0) for _ in range(2)]
    theirs = [gradients(150, seed=seed) for seed in (1, 2)]

    def train(trainer: Trainer, some: Sequence[Tensor]) -> None:
        for gradient in some:
            _train(trainer, [gradient])
            time.sleep(0.02)
        assert trainer.settle(20)
        trainer.close()

    threads = [threading.Thread(target=train, args=each, daemon=True) for each in zip(both, theirs, strict=True)]
    for each in threads:
        each.start()
    for _ in range(3):
        time.sleep(0.7)
        crash(server)
        server = started(recipe=dense(), address=address, **options)
    for each in threads:
        each.join(60)
    assert sorted(server.status().updates.values()) == [150, 150]
    total = (sum(theirs[0]) + sum(theirs[1])) / (2 if staleness == 0 else 1)
    torch.testing.assert_close(server._hub.central.parameters["large"].detach(), -total)

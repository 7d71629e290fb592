"""What is sent is applied: all of it, once, and as plain training would."""

import random
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Ranks
from served import (
    NUMEL,
    Busy,
    Raw,
    Table,
    Vector,
    closed,  # noqa: F401 - a fixture
    crash,
    cut,
    dense,
    gradients,
    joined,
    kept,
    soon,
    started,
    summing,
    thresholded,
    waiting,
)
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from thinwire import codecs, formats, recipes, schedules
from thinwire.errors import MomentumError, ServerError, StateError
from thinwire.payloads import Payload
from thinwire.reducer import Reducer
from thinwire.server import Server, Trainer, connect
from thinwire.trainer.channel import Channel
from thinwire.trainer.contents import Base, Copy
from thinwire.wire.frames import Flag, GoneError, Kind
from thinwire.wire.layout import Part, layouts
from thinwire.wire.sections import pack


def _trained(trainer: Trainer, model: Vector, steps: list[Tensor]) -> None:
    for gradient in steps:
        model.give(gradient)
        trainer.step()


def _at_once(*calls: tuple[Any, ...]) -> None:
    """Call each function with its arguments, in a thread of its own; raise what they raise."""
    raised: list[BaseException] = []

    def calling(function: Callable[..., object], *args: object) -> None:
        try:
            function(*args)
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=calling, args=call) for call in calls]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    if raised:
        raise raised[0]


@pytest.mark.parametrize("make", [thresholded, kept, dense])
def test_what_is_applied_and_what_waits_are_all_gradients(make: Callable[[], Reducer]) -> None:
    server_model, model, recipe, steps = Vector(), Vector(), make(), gradients(30)
    with started(server_model, make()) as server, joined(server, recipe, model) as trainer:
        _trained(trainer, model, steps)
        torch.testing.assert_close(waiting_or_none(recipe) - server_model.large, sum(steps))
        assert torch.equal(model.large, server_model.large)


def waiting_or_none(recipe: Reducer) -> Tensor:
    stateful = any(memory.stateful for memory in recipe.memories())
    return waiting(recipe) if stateful else torch.zeros(NUMEL, dtype=torch.float64)


def test_nothing_is_lost_or_applied_twice_when_connections_break() -> None:
    server_model, model, recipe, steps = Vector(), Vector(), thresholded(), gradients(60)
    chance = random.Random(0)
    with started(server_model) as server, joined(server, recipe, model, reconnect=30.0) as trainer:
        for gradient in steps:
            model.give(gradient)
            breaking = threading.Timer(chance.random() * 0.004, cut, [server])
            breaking.start()
            trainer.step()
            breaking.join()
        torch.testing.assert_close(waiting(recipe) - server_model.large, sum(steps))
        assert list(server.status().updates.values()) == [60]


def test_a_trainer_that_joins_again_keeps_its_new_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    server, ended = started(), list[int]()
    monkeypatch.setattr(server._hub.listener, "end", ended.append)
    _, trainer = Raw(server.address), Raw(server.address)
    assert trainer.update(1, trainer.body(1, gradients(1)[0])).number == 1
    assert not ended  # that number may be the new one's


def test_a_server_that_starts_again_applies_what_it_had_not_saved(tmp_path: Path) -> None:
    path = tmp_path / "server.pt"
    model, recipe, steps = Vector(), thresholded(), gradients(30)
    server = started(checkpoint=path, every=3600.0)
    address = server.address
    trainer = joined(server, recipe, model, reconnect=60.0)
    _trained(trainer, model, steps[:10])
    server.save()
    _trained(trainer, model, steps[10:20])
    crash(server)
    server_model = Vector()
    with started(server_model, checkpoint=path, address=address) as server, trainer:
        _trained(trainer, model, steps[20:])
        torch.testing.assert_close(waiting(recipe) - server_model.large, sum(steps))
        assert list(server.status().updates.values()) == [30]


def test_an_update_counts_once_however_often_it_comes() -> None:
    server_model, steps = Vector(), gradients(3)
    with started(server_model) as server:
        raw = Raw(server.address)
        bodies = [raw.body(i + 1, gradient) for i, gradient in enumerate(steps)]
        for number in (1, 1, 2, 1, 2, 3, 3):
            answer = raw.update(number, bodies[number - 1])
            assert (answer.kind, answer.number) == (Kind.UPDATE, number)
        assert not raw.update(3, bodies[2], flags=Flag.BRIEF).body
        torch.testing.assert_close(waiting(raw.recipe) - server_model.large, sum(steps))
        again = Raw(server.address)
        again.update(3, bodies[2])
        torch.testing.assert_close(waiting(raw.recipe) - server_model.large, sum(steps))
        assert server.status().version == 3


def test_an_update_that_is_not_the_next_ends_the_connection() -> None:
    server_model = Vector()
    with started(server_model) as server:
        raw = Raw(server.address)
        with pytest.raises(GoneError):
            raw.update(2, raw.body(2, gradients(1)[0]))
        assert not server_model.large.any()


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_synchronous_training_is_plain_averaging(momentum: float) -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1, momentum=momentum)

    steps, plain = [gradients(8, seed) for seed in range(3)], Vector()
    optimizer = make(plain.parameters())
    for several in zip(*steps, strict=True):
        plain.give(torch.stack(several).mean(0))
        optimizer.step()
    models, central = [Vector() for _ in steps], Vector()
    with started(central, dense(), make_optimizer=make, staleness=0, trainers=3) as server:
        trainers = [joined(server, dense(), model) for model in models]
        _at_once(*((_trained, *each) for each in zip(trainers, models, steps, strict=True)))
        torch.testing.assert_close(central.large, plain.large, rtol=1e-12, atol=1e-12)
        assert server.status().version == 8
        assert all(torch.equal(model.large, central.large) for model in models)


@pytest.mark.parametrize("goodbye", [True, False])
def test_a_round_closes_without_a_trainer_that_is_gone(goodbye: bool) -> None:
    models, steps, central = [Vector(), Vector()], gradients(4), Vector()
    with started(central, dense(), staleness=0, trainers=2) as server:
        first, second = (joined(server, dense(), model) for model in models)
        _at_once((_trained, first, models[0], steps), (_leaving, server, second, goodbye))
        torch.testing.assert_close(-central.large, sum(steps))


def _leaving(server: Server, trainer: Trainer, goodbye: bool) -> None:
    while not server._hub.rule._held:  # until the other one waits
        time.sleep(0.01)
    trainer.close(goodbye=goodbye)


def test_a_round_waits_for_a_trainer_whose_connection_broke(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thinwire.server.rule._BACK", 60.0)
    models, steps, central = [Vector(), Vector()], gradients(2), Vector()
    with started(central, dense(), staleness=0, trainers=2, timeout=60.0) as server:
        hub, (first, second) = server._hub, [joined(server, dense(), each, reconnect=20.0) for each in models]
        going = ThreadPoolExecutor(1).submit(_trained, first, models[0], steps[:1])
        assert soon(lambda: bool(hub.rule._held))
        with second._channels[0]._shared.turn, hub.lock:
            hub.sessions[second._channels[0]._settings.trainer].end("lost")
            hub.release()
        _trained(second, models[1], steps[1:])
        going.result(60)
        torch.testing.assert_close(-central.large, sum(steps) / 2)


def test_a_trainer_that_joins_again_is_no_further_ahead_than_the_bound() -> None:
    models = [Vector(), Vector()]
    with started(recipe=dense(), staleness=1, trainers=2) as server:
        hub, (fast, slow) = server._hub, [joined(server, dense(), each, reconnect=20.0) for each in models]
        name, paces = fast._channels[0]._settings.trainer, hub.rule.live
        going = ThreadPoolExecutor(1).submit(_trained, fast, models[0], gradients(3))
        for breaks in (True, True, True, False):
            assert soon(lambda: name in hub.sessions and bool(hub.sessions[name].busy))
            with hub.lock:
                assert max(paces.values()) - min(paces.values()) == 1
                if breaks:
                    hub.sessions[name].end("lost")
        _trained(slow, models[1], gradients(3))
        going.result(60)


def test_no_trainer_is_further_ahead_than_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    models, spread = [Vector(), Vector()], []
    with started(recipe=dense(), staleness=2, trainers=2) as server:
        rule = server._hub.rule
        apply = rule.central.apply

        def noting(updates: Any) -> set[str]:
            dropped = apply(updates)
            behind = [1 if update.trainer == who else 0 for update in updates for who in rule.live]
            clocks = [clock + more for clock, more in zip(rule.live.values(), behind, strict=True)]
            spread.append(max(clocks) - min(clocks))
            return dropped

        monkeypatch.setattr(rule.central, "apply", noting)
        fast, slow = (joined(server, dense(), model) for model in models)
        _at_once((_trained, fast, models[0], gradients(20)), (_slowly, slow, models[1], gradients(20)))
    assert max(spread) == 2


def vector_of(trainer: Trainer) -> Vector:
    assert isinstance(trainer.model, Vector)
    return trainer.model


def _slowly(trainer: Trainer, model: Vector, steps: list[Tensor]) -> None:
    for gradient in steps:
        threading.Event().wait(0.01)
        _trained(trainer, model, [gradient])


def test_without_a_bound_nobody_waits_for_a_slow_trainer() -> None:
    model, central = Vector(), Vector()
    with started(central, dense(), trainers=2) as server:
        slow, fast = joined(server, dense()), joined(server, dense(), model)
        _trained(fast, model, gradients(20))
        assert server.status().version == 20
        vector_of(slow).give(gradients(1)[0])
        slow.step()
        assert server.status().staleness[20] == 1


def test_a_stale_update_counts_for_less_if_damped() -> None:
    central, model = Vector(), Vector()
    with started(central, dense(), damped=True) as server:
        slow, fast = joined(server, dense()), joined(server, dense(), model)
        _trained(fast, model, gradients(3))
        before = central.large.detach().clone()
        vector_of(slow).give(torch.ones(NUMEL, dtype=torch.float64))
        slow.step()
        torch.testing.assert_close(before - central.large, torch.full_like(before, 1 / 4))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_is_neither_sent_nor_applied(bad: float) -> None:
    central, model, recipe = Vector(), Vector(), thresholded()
    first, second = gradients(2)
    with started(central) as server, joined(server, recipe, model) as trainer:
        _trained(trainer, model, [first])
        model.give(first.clone().fill_(bad))
        assert not trainer.step()
        _trained(trainer, model, [second])
        torch.testing.assert_close(waiting(recipe) - central.large, first + second)
        assert trainer.traffic().skipped == 1

        before, raw = central.large.detach().clone(), Raw(server.address)
        answer = raw.update(1, raw.body(1, first.clone().fill_(bad)))
        assert answer.flags & Flag.DROPPED
        assert torch.equal(before, central.large)
        assert server.status().dropped == 1


def test_finite_gradients_that_overflow_with_the_residual_are_an_error_and_lose_nothing() -> None:
    central, model, recipe = Vector(), Vector(), thresholded()
    with started(central) as server, joined(server, recipe, model) as trainer:
        huge = gradients(1)[0].clamp(min=1.0, max=2.0) * 6e307
        _trained(trainer, model, [huge])
        before, sent = waiting(recipe), central.large.detach().clone()
        assert before.abs().max() > 0.5e308
        model.give(torch.full_like(huge, torch.finfo(huge.dtype).max))
        with pytest.raises(FloatingPointError, match=r"beyond the range of their dtype: nothing was sent.*clip"):
            trainer.step()
        assert torch.equal(waiting(recipe), before)
        assert torch.equal(central.large, sent)
        _trained(trainer, model, [torch.zeros_like(huge)])
        assert server.status().dropped == 0


def test_rows_that_add_up_to_more_than_their_dtype_holds_cost_no_residual() -> None:
    model, recipe = Table().half(), recipes.topk(density=0.25, minimum_size=1)
    server = started(Table().half(), recipes.topk(density=0.25, minimum_size=1))
    trainer = joined(server, recipe, model)
    for value, sent in ((1.0, True), (40000.0, False)):
        model.rows.weight.grad = torch.sparse_coo_tensor(
            torch.tensor([[7, 7]]), torch.full((2, 4), value).half(), (50, 4)
        )
        model.out.weight.grad, model.out.bias.grad = torch.ones(1, 4).half(), torch.ones(1).half()
        assert trainer.step() is sent
    assert (trainer.traffic().updates, trainer.traffic().skipped, server.status().dropped) == (1, 1, 0)


def test_a_mean_leaves_out_what_is_not_finite() -> None:
    central, good = Vector(), gradients(1)[0]
    with started(central, staleness=0, trainers=2) as server:
        trainer, bad = joined(server), Raw(server.address)
        body = bad.body(1, good.clone().fill_(torch.nan))
        vector_of(trainer).give(good)
        _at_once((trainer.step,), (bad.update, 1, body))
        assert central.large.detach().abs().max() == good.abs().max()


SKETCH = codecs.CountSketch(ratio=8.0)


@pytest.mark.parametrize("codec", [codecs.TopK(density=0.1), codecs.HashedSlots(density=0.1), SKETCH])
def test_a_compressed_answer_leaves_both_sides_with_the_same_copy(codec: codecs.Codec) -> None:
    central, model = Vector(), Vector()
    with started(central, dense(), down=codec) as server, joined(server, dense(), model, down=codec) as trainer:
        for gradient in gradients(20):
            _trained(trainer, model, [gradient])
            (session,) = server._hub.sessions.values()
            theirs = session._downlink._theirs[torch.float64]
            assert torch.equal(theirs[:NUMEL], model.large)
            assert torch.equal(theirs[NUMEL:], model.small)


NOISY = {
    "count sketch": codecs.CountSketch(),
    "unbiased": codecs.RandomK(density=schedules.exponential_warmup(0.1, steps_each=9), unbiased=True),
    "ternary": codecs.Cast(values=formats.Ternary()),
}


@pytest.mark.parametrize("codec", NOISY.values(), ids=NOISY)
def test_a_codec_whose_errors_would_add_up_in_answers_is_refused(codec: codecs.Codec) -> None:
    with pytest.raises(ValueError, match=r"down is .*errors add up.*expected a codec for error feedback"):
        started(down=codec)


def test_what_an_answer_leaves_out_comes_later() -> None:
    central, model, codec = Vector(), Vector(), codecs.TopK(density=0.1)
    with started(central, dense(), down=codec) as server, joined(server, dense(), model, down=codec) as trainer:
        _trained(trainer, model, gradients(5))
        assert not torch.equal(model.large, central.large)
        _trained(trainer, model, [torch.zeros(NUMEL, dtype=torch.float64)] * 30)
        torch.testing.assert_close(model.large, central.large)


def test_draining_leaves_nothing_waiting() -> None:
    central, model, recipe, steps = Vector(), Vector(), thresholded(), gradients(20)
    with started(central) as server, joined(server, recipe, model) as trainer:
        _trained(trainer, model, steps)
        assert waiting(recipe).any()
        trainer.drain()
        assert not waiting(recipe).any()
        torch.testing.assert_close(-central.large, sum(steps))


def test_draining_comes_at_the_same_steps_for_the_same_seed() -> None:
    counts = []
    for seed in (1, 1, 2):
        central, model, recipe, steps = Vector(), Vector(), kept(), gradients(60)
        with started(central, kept()) as server, joined(server, recipe, model, drain=10, seed=seed) as trainer:
            _trained(trainer, model, steps)
            torch.testing.assert_close(waiting(recipe) - central.large, sum(steps))
            counts.append((trainer.traffic().drained, trainer.traffic().sent_bytes))
    assert counts[0] == counts[1] != counts[2]
    assert 1 <= counts[0][0] < 20


def test_hogwild_threads_lose_nothing() -> None:
    central, recipe, steps = Vector(), thresholded(), gradients(80)
    lock, rest = threading.Lock(), list(steps)
    with started(central) as server, joined(server, recipe) as trainer:

        def work(module: nn.Module) -> None:
            assert isinstance(module, Vector)
            while True:
                with lock:
                    if not rest:
                        return
                    gradient = rest.pop()
                module.give(gradient)
                trainer.step(module)

        trainer.run(work, threads=4)
        assert trainer.traffic().updates == 80
        assert min(trainer.memory.waiting, trainer.memory.scratch) > 0
        torch.testing.assert_close(waiting(recipe) - central.large, sum(steps))
        assert torch.equal(vector_of(trainer).large, central.large)


def test_threads_end_when_their_run_is_interrupted() -> None:
    with started() as server, joined(server) as trainer:

        def work(module: nn.Module) -> None:
            assert isinstance(module, Vector)
            for i in range(500):
                module.give(gradients(1)[0])
                trainer.step(module)
                if i == 3:
                    signal.pthread_kill(main, signal.SIGINT)

        main = threading.get_ident()
        with pytest.raises(KeyboardInterrupt):
            trainer.run(work, threads=1)
        assert trainer.traffic().updates < 500
        assert trainer.step()


def test_replicas_of_later_runs_are_not_taken_for_those_of_earlier_ones() -> None:
    with started() as server, joined(server) as trainer:
        for gradient in gradients(40):

            def work(module: nn.Module, gradient: torch.Tensor = gradient) -> None:
                assert isinstance(module, Vector)
                module.give(gradient)
                trainer.step(module)

            kept = [trainer.replica() for _ in range(3)]
            trainer.run(work, threads=1)
            del kept  # so that replicas are made where others were
        assert server.status().staleness == {0: 40}


def test_replicas_share_parameters_alone() -> None:
    with started() as server, joined(server) as trainer:
        one, other = trainer.replica(), trainer.replica()
        assert isinstance(one, Vector)
        assert isinstance(other, Vector)
        one.give(gradients(1)[0])
        assert other.large.grad is None
        assert one.large.data_ptr() == other.large.data_ptr() == vector_of(trainer).large.data_ptr()


def test_updates_in_flight_are_applied_in_order() -> None:
    central, model, recipe, steps = Vector(), Vector(), thresholded(), gradients(40)
    with started(central) as server, joined(server, recipe, model, in_flight=3) as trainer:
        _trained(trainer, model, steps)
        trainer.drain()
        torch.testing.assert_close(-central.large, sum(steps))


def _answered(channel: Channel, number: int) -> bool:
    return channel._answered == number


def test_parameters_stay_as_they_are_between_steps_with_updates_in_flight() -> None:
    central, model = Vector(), Vector()
    with (
        started(central, dense(), make_optimizer=Busy) as server,
        joined(server, dense(), model, in_flight=1) as trainer,
    ):
        (busy,), (channel,) = server._hub.central.optimizers, trainer._channels
        assert isinstance(busy, Busy)
        for number, gradient in enumerate(gradients(4), start=1):
            model.give(gradient)
            trainer.step()
            before = model.large.detach().clone()
            busy.done.set()  # the answer comes after the step
            assert soon(partial(_answered, channel, number))
            assert torch.equal(model.large, before)
            busy.done.clear()
        assert server.status().staleness == {0: 1, 1: 3}
        busy.done.set()
        trainer.drain()
        assert torch.equal(model.large, central.large)


def test_answers_with_all_parameters_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    model, written = Vector(), list[Payload]()
    (layout,) = layouts(model, dense(), None, servers=1, fetch_rows=False)
    copy, (part,) = Copy(layout, model), layout.dense
    for number in (1, 2, 3):
        section = part.plain(torch.full((part.numel,), float(number), dtype=part.dtype), number).packed
        copy.take(memoryview(bytearray(b"".join(pack([section])))), Base(number, 1), number)

    def noted(part: Part, payload: Payload, flat: Tensor, *, whole: bool) -> None:
        written.append(payload)
        write(part, payload, flat, whole=whole)

    write = Part.write
    monkeypatch.setattr(Part, "write", noted)
    copy.catch_up()
    assert (len(written), model.large.unique().item(), copy.base.version) == (1, 3, 3)


def _cloned(model: nn.Module) -> None:
    for p in model.parameters():
        p.data = p.data.clone()


def _assigned(model: nn.Module) -> None:
    model.load_state_dict({name: x.clone() for name, x in model.state_dict().items()}, assign=True)


MOVES: dict[str, Callable[[nn.Module], object]] = {
    "data": _cloned,
    "assign": _assigned,
    "dtype": lambda model: model.half(),
    "dtype and back": lambda model: model.half().double(),
    "frozen": lambda model: model.requires_grad_(False),
    "another": lambda model: model.register_parameter("small", nn.Parameter(torch.zeros(3))),
}


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES.keys())
@pytest.mark.parametrize("where", ["trainer", "replica", "server"])
def test_parameters_that_move_are_an_error_at_the_next_step(where: str, move: Callable[[nn.Module], object]) -> None:
    central, model = Vector(), Vector()
    with started(central) as server, joined(server, model=model) as trainer:
        replica = trainer.replica()
        move({"trainer": model, "replica": replica, "server": central}[where])
        stepping = replica if where == "replica" else model
        for p in stepping.parameters():
            p.grad = torch.ones_like(p)
        with pytest.raises(
            ServerError if where == "server" else StateError, match=r"(large|small) was (moved|removed|frozen)"
        ):
            trainer.step(stepping)
        assert server.status().version == 0


def test_parameters_that_something_else_changes_are_noted(caplog: pytest.LogCaptureFixture) -> None:
    model, codec = Table(), codecs.TopK(density=0.5)
    with (
        started(Table(), dense(), down=codec, fetch_rows=True) as server,
        joined(server, dense(), model, down=codec, fetch_rows=True) as trainer,
    ):
        for _ in range(3):
            trainer.fetch({"rows.weight": torch.arange(3)})
            model(torch.arange(3)).sum().backward()
            trainer.step()
        assert "has changed parameters" not in caplog.text
        for _ in range(2):
            model.load_state_dict(Table().state_dict())
            trainer.step()
        assert caplog.text.count("has changed parameters") == 1


def test_a_model_is_served_or_trained_once_at_a_time() -> None:
    model = Vector()
    for _ in range(2):  # it is free when its server is closed
        with started(model) as server, pytest.raises(ValueError, match="is in use by another serve or connect"):
            joined(server, model=model)
    server = started()
    for _ in range(2):
        with joined(server, model=model), pytest.raises(ValueError, match="large is in use"):
            started(model)


def test_parameters_that_share_memory_and_are_not_one_are_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    started(model, dense()).close()
    model[1].weight = nn.Parameter(model[0].get_parameter("weight").data)
    with pytest.raises(ValueError, match=r"0.weight and 1.weight lie in one memory.*make them one Parameter"):
        started(model, dense())


def test_parameters_on_several_devices_are_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False, device="meta"))
    with pytest.raises(ValueError, match=r"0.weight on cpu and 1.weight on meta: expected one device"):
        connect(model, dense(), address="127.0.0.1:9")


def test_a_sparse_embedding_may_be_on_a_device_of_its_own() -> None:
    model = Table()
    model.rows.to("meta")
    joined(started(Table(), dense()), dense(), model)
    assert {name: p.device.type for name, p in model.named_parameters()} == {
        "rows.weight": "meta",
        "out.weight": "cpu",
        "out.bias": "cpu",
    }


def test_what_no_server_has_is_not_trained_without_a_word() -> None:
    model, central = Vector(), Vector()
    for each in (model, central):
        each.small.requires_grad_(False)
    with started(central) as server, joined(server, model=model) as trainer:
        model.small.requires_grad_(True)
        model.give(gradients(1)[0])
        with pytest.raises(StateError, match="small has a gradient, but no server has that parameter"):
            trainer.step()
        model.small.requires_grad_(False)
        assert trainer.step()
        model.added = nn.Linear(1, 1)
        model.added(torch.ones(1)).sum().backward()
        with pytest.raises(StateError, match=r"added.weight has a gradient, .*\(2 such"):
            trainer.step()


def test_several_servers_share_the_parameters() -> None:
    recipe, model, steps, halves = thresholded(), Vector(), gradients(20), [Vector(), Vector()]
    options: dict[str, Any] = {"servers": 2, "make_optimizer": summing}
    one, two = (started(half, index=i, **options) for i, half in enumerate(halves))
    trainer = joined(one, recipe, model, address=[one.address, two.address], servers=2)
    _trained(trainer, model, steps)
    torch.testing.assert_close(waiting(recipe) - halves[0].large, sum(steps))
    torch.testing.assert_close(-halves[1].small, sum(x[:3] for x in steps))
    assert not halves[0].small.any()
    assert not halves[1].large.any()


@pytest.mark.parametrize("optimizer", [torch.optim.SparseAdam, torch.optim.Adagrad, torch.optim.SGD])
def test_rows_of_sparse_embeddings_stay_rows(optimizer: Any) -> None:
    plain, central, model, other = Table(), Table(), Table(), Table()
    made: dict[str, Any] = {
        "make_optimizer": lambda p: torch.optim.SGD(p, lr=0.1),
        "make_rows_optimizer": lambda p: optimizer(p, lr=0.1),
    }
    dense_one, sparse_one = (
        made["make_optimizer"](plain.out.parameters()),
        made["make_rows_optimizer"](plain.rows.parameters()),
    )
    with started(central, dense(), **made) as server:
        trainer, watcher = joined(server, dense(), model), joined(server, dense(), other)
        for step in range(6):
            ids = torch.tensor([step, 7, 2 * step])
            for each in (plain, model):
                each.zero_grad()
                each(ids).pow(2).sum().backward()
            trainer.step()
            dense_one.step()
            sparse_one.step()
            torch.testing.assert_close(central.rows.weight, plain.rows.weight)
            assert torch.equal(model.rows.weight, central.rows.weight)
        before = watcher.traffic().received_bytes
        watcher.step()
        assert torch.equal(other.rows.weight, central.rows.weight)
        assert watcher.traffic().received_bytes - before < central.rows.weight.nbytes


def test_an_optimizer_that_moves_other_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="moves rows of sparse embeddings that got no gradient"):
        started(Table(), dense(), make_optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))


@pytest.mark.parametrize(
    "of", [lambda model: model.parameters(), lambda model: [model.out.bias], lambda _: Vector().parameters()]
)
def test_an_optimizer_of_other_parameters_than_it_is_given_is_refused(of: Callable[[Table], Any]) -> None:
    model = Table()
    with pytest.raises(ValueError, match=r"optimizer SGD holds \d parameters; expected the \d that it is given"):
        started(model, dense(), make_optimizer=lambda _: torch.optim.SGD(of(model), lr=0.1))
    with pytest.raises(TypeError, match="made a NoneType"):
        started(model, dense(), make_optimizer=lambda _: None)
    model.out.bias.requires_grad_(False)
    more = {"make_rows_optimizer": torch.optim.SGD}
    started(model, dense(), make_optimizer=lambda p: torch.optim.SGD([*p, model.out.bias], lr=0.1), **more)


@pytest.mark.parametrize("make", [lambda _: None, torch.optim.lr_scheduler.ReduceLROnPlateau])
def test_a_scheduler_that_could_not_step_is_refused(make: Any) -> None:
    with pytest.raises(TypeError, match=r"make_scheduler made a .*; expected one .* without metrics"):
        started(make_scheduler=make)


def test_a_mean_stays_in_the_range_of_16_bits() -> None:
    options: dict[str, Any] = {"make_optimizer": partial(torch.optim.SGD, lr=2**-10), "staleness": 0, "trainers": 2}
    server = started(Vector(dtype=torch.float16), dense(), **options)
    trainers = [joined(server, dense(), Vector(dtype=torch.float16)) for _ in range(2)]
    for trainer, value in zip(trainers, (60000.0, 50000.0), strict=True):
        trainer.model.give(torch.full((NUMEL,), value, dtype=torch.float16))  # type: ignore[operator]
    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(Trainer.step, trainers))
    assert server._hub.central.parameters["large"].unique().tolist() == [pytest.approx(-55000 / 1024, rel=1e-3)]


def test_a_model_that_is_distributed_already_is_refused(ranks: Ranks) -> None:
    assert ranks.run(1, _distributed)


def _distributed() -> bool:
    kinds: list[tuple[Any, str]] = [(nn.parallel.DistributedDataParallel, "its .module"), (fully_shard, "are sharded")]
    for wrap, told in kinds:
        with pytest.raises(TypeError, match=told):
            started(wrap(nn.Linear(4, 4)), dense())
    return True


def test_what_is_served_within_inference_mode_is_refused_as_no_step_could_change_it() -> None:
    server = started()
    with torch.inference_mode():
        for call in (started, partial(joined, server)):
            with pytest.raises(RuntimeError, match=r"laid out within torch\.inference_mode\(\)"):
                call()


def test_gradients_that_have_a_graph_are_sent() -> None:
    central, model = Vector(), Vector()
    with started(central, dense()) as server, joined(server, dense(), model) as trainer:
        model.give(gradients(1)[0])
        for p in model.parameters():
            assert p.grad is not None
            p.grad.requires_grad_()  # as after backward(create_graph=True)
        assert trainer.step()
        assert torch.equal(-central.large, gradients(1)[0])


def test_complex_parameters_are_refused() -> None:
    with pytest.raises(ValueError, match=r"large is complex; keep it as torch.view_as_real"):
        started(Vector(dtype=torch.complex64), dense())


def test_a_loss_that_is_given_for_the_module_is_told() -> None:
    trainer = joined(started())
    with pytest.raises(TypeError, match=r"module is tensor\(1.\); expected a replica, and the loss by name"):
        trainer.step(torch.tensor(1.0))  # type: ignore[arg-type]


def test_momentum_is_applied_once() -> None:
    with pytest.raises(MomentumError, match="would again"):
        started(recipe=recipes.dgc(momentum=0.9), make_optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
    with pytest.raises(MomentumError, match="give it momentum="):
        started(recipe=recipes.dgc())
    with pytest.raises(MomentumError, match="fades"):
        started(recipe=recipes.fading())


def test_a_learning_rate_follows_the_servers_steps() -> None:
    central, model = Vector(), Vector()

    def halving(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)

    with started(central, dense(), make_scheduler=halving) as server, joined(server, dense(), model) as trainer:
        _trained(trainer, model, [torch.ones(NUMEL, dtype=torch.float64)] * 3)
        torch.testing.assert_close(central.large, torch.full_like(central.large, -1.75))

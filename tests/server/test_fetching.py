"""Rows that trainers ask for are the server's, and nothing else of the rows comes down."""

import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from served import (
    Raw,
    Table,
    Vector,
    closed,  # noqa: F401 - a fixture
    crash,
    cut,
    dense,
    joined,
    soon,
    started,
    thresholded,
    warnings,
)
from torch import Tensor, nn

from thinwire import codecs
from thinwire.errors import FingerprintError, PayloadError, ServerError
from thinwire.payloads import wire
from thinwire.server import Server, Trainer
from thinwire.trainer.contents import Copy
from thinwire.wire.frames import HEADER, MAGIC, PROTOCOL, FrameError, GoneError, Kind
from thinwire.wire.layout import Layout
from thinwire.wire.parameters import entries
from thinwire.wire.sections import asking, most_ids, pack, read_ids, table, unpack

NAME = "rows.weight"
IDS = torch.tensor([7, 3, 49, 7, 0])


def _made(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01)


def _started(model: nn.Module, **options: Any) -> Server:
    return started(model, dense(), **{"make_optimizer": _made, "fetch_rows": True, **options})


def _joined(server: Server, model: nn.Module | None = None, **options: Any) -> Trainer:
    return joined(server, dense(), model or Table(seed=1), **{"fetch_rows": True, **options})


def _step(trainer: Trainer, ids: Tensor, module: nn.Module | None = None) -> None:
    module = module or trainer.model
    module.zero_grad()
    module(ids).pow(2).sum().backward()
    trainer.step(module)


def _batches(count: int, rows: int = 50) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(rows, (5,), generator=generator) for _ in range(count)]


def _trained(trainer: Trainer, batches: list[Tensor]) -> None:
    for ids in batches:
        trainer.fetch({NAME: ids})
        _step(trainer, ids)


@pytest.mark.parametrize("ids", [IDS, IDS.int(), IDS[None, :, None], IDS[:0], torch.arange(50), torch.tensor(3)])
def test_fetched_rows_are_the_servers_and_the_others_stay(ids: Tensor) -> None:
    central, model, own = Table(), Table(seed=1), Table(seed=1).rows.weight
    with _started(central) as server, _joined(server, model) as trainer:
        assert torch.equal(model.rows.weight, own)
        assert torch.equal(model.out.weight, central.out.weight)
        trainer.fetch({NAME: ids})
        fetched = torch.zeros(50, dtype=torch.bool).index_fill_(0, ids.reshape(-1).long(), value=True)
        assert torch.equal(model.rows.weight[fetched], central.rows.weight[fetched])
        assert torch.equal(model.rows.weight[~fetched], own[~fetched])
        assert trainer.traffic().fetched_rows == fetched.sum()


def test_servers_and_trainers_ask_for_no_default_device() -> None:
    central, model = Table(1), Table(2)
    with torch.device("meta"):  # as after torch.set_default_device
        _joined(_started(central), model).fetch()
    assert torch.equal(model.rows.weight, central.rows.weight)
    assert torch.equal(model.out.weight, central.out.weight)


def test_all_rows_are_fetched_at_once() -> None:
    central, model = Table(), Table(seed=1)
    with _started(central) as server, _joined(server, model) as trainer:
        trainer.fetch()
        assert torch.equal(model.rows.weight, central.rows.weight)


@pytest.mark.parametrize("down", [None, codecs.TopK(density=0.5)])
@pytest.mark.parametrize("in_flight", [0, 2])
def test_rows_are_those_after_all_that_was_sent(down: codecs.Codec | None, in_flight: int) -> None:
    central, model = Table(), Table(seed=1)
    with (
        _started(central, down=down) as server,
        _joined(server, model, down=down, in_flight=in_flight) as trainer,
    ):
        for number, ids in enumerate(_batches(12), start=1):
            trainer.fetch({NAME: ids})
            assert server.status().version == number - 1
            assert torch.equal(model.rows.weight[ids], central.rows.weight[ids])
            _step(trainer, ids)


def test_training_is_plain_training() -> None:
    plain, central, model = Table(), Table(), Table(seed=1)
    optimizer = _made(plain.parameters())
    with _started(central) as server, _joined(server, model) as trainer:
        for ids in _batches(10):
            plain.zero_grad()
            plain(ids).pow(2).sum().backward()
            optimizer.step()
            _trained(trainer, [ids])
        torch.testing.assert_close(central.rows.weight, plain.rows.weight)
        assert server.status().staleness == {0: 10}


def test_synchronous_trainers_that_fetch_train_as_those_that_are_told() -> None:
    found = []
    for fetch_rows in (False, True):
        central = Table()
        with _started(central, staleness=0, trainers=2, fetch_rows=fetch_rows) as server:
            trainers = [_joined(server, fetch_rows=fetch_rows) for _ in range(2)]
            halves = _batches(20)[:10], _batches(20)[10:]
            work = _trained if fetch_rows else _told
            with ThreadPoolExecutor(2) as pool:
                for done in [pool.submit(work, *each) for each in zip(trainers, halves, strict=True)]:
                    done.result()
            assert server.status().staleness == {0: 20}
        found.append(central.rows.weight)
    assert torch.equal(*found)


def _told(trainer: Trainer, batches: list[Tensor]) -> None:
    for ids in batches:
        _step(trainer, ids)


def test_fewer_bytes_come_down_than_with_every_answer() -> None:
    received = []
    for fetch_rows in (False, True):
        with _started(Table(rows=20_000), fetch_rows=fetch_rows) as server:
            mine, other = (_joined(server, Table(rows=20_000), fetch_rows=fetch_rows) for _ in range(2))
            joining = mine.traffic().received_bytes
            for ids in _batches(10, rows=20_000):
                if fetch_rows:
                    _trained(other, [torch.arange(1000)])
                    _trained(mine, [ids])
                else:
                    _step(other, torch.arange(1000))
                    _step(mine, ids)
            received.append((joining, mine.traffic().received_bytes - joining))
    (whole, pushed), (without, fetched) = received
    assert whole - without > 20_000 * 4 * 4 * 0.9
    assert fetched * 10 < pushed


def test_threads_fetch_and_step_at_once() -> None:
    central, model, rest, lock = Table(), Table(seed=1), _batches(60), threading.Lock()
    total = torch.zeros(50, dtype=torch.int64)
    for ids in rest:
        total += ids.bincount(minlength=50)
    with _started(central) as server, _joined(server, model, in_flight=1) as trainer:

        def work(module: nn.Module) -> None:
            while True:
                with lock:
                    if not rest:
                        return
                    ids = rest.pop()
                trainer.fetch({NAME: ids})
                _step(trainer, ids, module)

        trainer.run(work, threads=4)
        trainer.fetch()
        assert torch.equal(model.rows.weight, central.rows.weight)
        assert server.status().version == 60
        changed = (central.rows.weight != Table().rows.weight).any(1)
        assert torch.equal(changed, total > 0)


class Slow(torch.optim.SGD):
    """A step that takes longer than a trainer needs to send the next update."""

    def step(self, closure: Any = None) -> Any:
        time.sleep(0.01)
        return super().step(closure)


def test_updates_do_not_overtake_a_question_for_ever() -> None:
    with (
        _started(Table(), make_optimizer=lambda some: Slow(some, lr=0.0)) as server,
        _joined(server, in_flight=20) as trainer,
    ):
        trainer.fetch()
        stop = threading.Event()

        def work(module: nn.Module) -> None:
            while not stop.is_set():
                _step(trainer, IDS, module)

        running = threading.Thread(target=trainer.run, args=(work,), kwargs={"threads": 3}, daemon=True)
        running.start()
        assert soon(lambda: trainer.traffic().updates > 30)
        asking = threading.Thread(target=trainer.fetch, daemon=True)
        asking.start()
        asking.join(10)
        overtaken = asking.is_alive()
        stop.set()
        running.join(20)
        assert not overtaken


class Tables(nn.Module):
    """Three sparse embeddings of different sizes, two of which one of two servers has, and a dense one."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.a, self.b, self.c = (nn.Embedding(count, 4, sparse=True) for count in (300, 120, 100))
            self.out = nn.Linear(12, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(torch.cat([self.a(ids), self.b(ids), self.c(ids)], -1))


def test_several_servers_are_asked_for_what_they_hold() -> None:
    halves, model, own = [Tables(), Tables()], Tables(seed=1), Tables(seed=1)
    one, two = (_started(half, servers=2, index=i) for i, half in enumerate(halves))
    trainer = _joined(one, model, address=[one.address, two.address], servers=2)
    trainer.fetch({"a.weight": IDS, "c.weight": IDS})
    fresh = Tables()
    assert torch.equal(model.a.weight[IDS], fresh.a.weight[IDS])
    assert torch.equal(model.c.weight[IDS], fresh.c.weight[IDS])
    assert torch.equal(model.b.weight, own.b.weight)
    trainer.fetch()
    _step(trainer, IDS)
    trainer.fetch()
    held = [{each.name for each in server._hub.central.layout.fetched} for server in (one, two)]
    assert held[0]
    assert held[1]
    for half, names in zip(halves, held, strict=True):
        assert all(torch.equal(half.get_parameter(name), model.get_parameter(name)) for name in names)


@pytest.mark.parametrize(
    ("rows", "kind", "told"),
    [
        ({NAME: torch.tensor([3, 50])}, ValueError, "range from 3 to 50; expected 0 to 49: pass the ids"),
        ({NAME: torch.tensor([-1])}, ValueError, "range from -1 to -1; expected 0 to 49"),
        ({NAME: torch.tensor([2**40])}, ValueError, "expected 0 to 49"),
        ({NAME: torch.tensor([1.0])}, TypeError, "ids of rows.weight are torch.float32; expected int64 or int32: call"),
        ({NAME: torch.tensor([True])}, TypeError, "torch.bool"),
        ({NAME: [1]}, TypeError, "expected a Mapping from a str to a Tensor"),
        ({"out.weight": IDS}, ValueError, "'out.weight' has no rows to fetch; expected some of 'rows.weight'"),
        ({"rows": IDS, NAME: IDS}, ValueError, "'rows' has no rows to fetch"),
    ],
)
def test_bad_ids_are_refused_before_anything_is_sent(rows: Any, kind: type[Exception], told: str) -> None:
    with _started(Table()) as server, _joined(server) as trainer:
        before = trainer.traffic().sent_bytes
        with pytest.raises(kind, match=told):
            trainer.fetch(rows)
        assert trainer.traffic().sent_bytes == before
        trainer.fetch({NAME: IDS})


def test_rows_are_fetched_only_where_both_sides_agreed_to() -> None:
    pushing, fetching = _started(Table(), fetch_rows=False), _started(Table())
    with pytest.raises(FingerprintError, match="fetch_rows differs: the server has False, this trainer has True; use"):
        _joined(pushing)
    with pytest.raises(FingerprintError, match="fetch_rows differs: the server has True, this trainer has False"):
        _joined(fetching, fetch_rows=False)
    with pytest.raises(ValueError, match="fetch needs fetch_rows=True"):
        _joined(pushing, fetch_rows=False).fetch()
    with pytest.raises(ValueError, match="has no rows to fetch: make its embeddings with sparse=True"):
        started(Vector(), fetch_rows=True)
    with pytest.raises(ValueError, match="has no rows to fetch"):
        _joined(fetching, Vector())


def test_gradients_of_rows_that_were_never_fetched_are_refused() -> None:
    central = Table()
    with _started(central) as server, _joined(server) as trainer:
        trainer.fetch({NAME: IDS})
        with pytest.raises(ValueError, match=r"gradients for 2 rows that were never fetched, such as row 4: call"):
            _step(trainer, torch.tensor([7, 30, 4]))
        assert trainer.traffic().updates == 0
        _step(trainer, IDS)
        assert server.status().version == 1


def test_an_update_is_as_stale_as_the_oldest_row_it_used() -> None:
    with _started(Table()) as server:
        mine, other = _joined(server), _joined(server)
        mine.fetch()
        _trained(other, _batches(3))
        _step(mine, IDS)  # at version 3: everything is of version 0
        mine.fetch({NAME: IDS[:2]})
        _step(mine, IDS[:2])  # at 4: rows and the rest are of version 4
        _step(mine, IDS)  # at 5: other rows are of version 0 still
        assert server.status().staleness == {0: 4, 3: 1, 5: 1}


def test_a_server_with_rows_alone_counts_from_their_fetch() -> None:
    with _started(nn.Embedding(50, 4, sparse=True)) as server:
        mine, other = (_joined(server, nn.Embedding(50, 4, sparse=True)) for _ in range(2))
        other.fetch()
        _step(other, IDS)
        mine.fetch()
        _step(mine, IDS)
        assert server.status().staleness == {0: 2}


def test_rows_are_no_newer_than_the_server_that_started_again() -> None:
    rows = Copy(LAYOUT, Table())
    for keys, version in (([1, 2], 9), ([3], 2)):
        answer = pack([table(ENTRY, torch.tensor(keys), torch.ones(len(keys), 4))])
        rows.fetched([torch.tensor(keys)], memoryview(bytearray(b"".join(bytes(x) for x in answer))), version)
    rows.rejoined(4)
    gradients = [torch.sparse_coo_tensor(torch.tensor([[key]]), torch.ones(1, 4), (50, 4)) for key in (1, 3)]
    assert [rows.oldest(7, {NAME: gradient}) for gradient in gradients] == [4, 2]


def test_rows_are_fetched_from_a_server_that_started_again(tmp_path: Path) -> None:
    path, batches, model = tmp_path / "server.pt", _batches(30), Table(seed=1)
    server = _started(Table(), checkpoint=path, every=3600.0)
    address, trainer = server.address, _joined(server, model, reconnect=60.0)
    _trained(trainer, batches[:10])
    server.save()
    _trained(trainer, batches[10:20])
    crash(server)
    central = Table()
    with _started(central, checkpoint=path, address=address) as server, trainer:
        _trained(trainer, batches[20:])
        trainer.fetch()
        assert torch.equal(model.rows.weight, central.rows.weight)
        assert server.status().version == 30


def test_a_question_outlives_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    central, model = Table(), Table(seed=1)
    with _started(central) as server, _joined(server, model, reconnect=30.0) as trainer:
        (session,) = server._hub.sessions.values()
        monkeypatch.setattr(session, "go_on", lambda: cut(server))
        trainer.fetch({NAME: IDS})
        assert torch.equal(model.rows.weight[IDS], central.rows.weight[IDS])


def test_connections_that_break_lose_no_question() -> None:
    central, model = Table(), Table(seed=1)
    with _started(central) as server, _joined(server, model, reconnect=30.0) as trainer:
        for i, ids in enumerate(_batches(30)):
            breaking = threading.Timer(i % 5 * 0.001, cut, [server])
            breaking.start()
            _trained(trainer, [ids])
            breaking.join()
        trainer.fetch()
        assert torch.equal(model.rows.weight, central.rows.weight)
        assert server.status().version == 30


def test_whoever_fetches_from_a_server_that_is_gone_is_told() -> None:
    server = _started(Table())
    trainer = _joined(server)
    server.close()
    with pytest.raises(ServerError, match="is gone"):
        trainer.fetch()
    trainer.close()


@pytest.mark.parametrize("call", [lambda trainer: trainer.fetch(), lambda trainer: trainer.step()])
def test_a_closed_trainer_says_so(call: Callable[[Trainer], object]) -> None:
    trainer = _joined(_started(Table()))
    trainer.close()
    with pytest.raises(ServerError, match="was closed: connect again"):
        call(trainer)


@pytest.fixture
def guarded(caplog: pytest.LogCaptureFixture) -> Iterator[Server]:
    """A server that must stand where it stood, and go on with its trainers."""
    central = Table()
    server = started(central, thresholded(), fetch_rows=True, make_optimizer=_made)
    trainer = joined(server, thresholded(), Table(seed=1), fetch_rows=True)
    trainer.fetch({NAME: IDS})
    before = central.rows.weight.detach().clone()
    yield server
    assert torch.equal(before, central.rows.weight)
    trainer.fetch({NAME: IDS})
    _step(trainer, IDS)
    assert len(warnings(caplog)) == 1


LAYOUT = Layout(entries(Table()), thresholded(), fetch_rows=True)
(ENTRY,) = LAYOUT.fetched


def _asked(coding: int, count: int, rest: bytes) -> bytes:
    head = wire.Header(wire.BLOCKS, torch.float32, count, 50, coding=coding).pack()
    body = head + rest
    return struct.pack("<Q", len(body)) + body


MALFORMED = {
    "nothing": b"",
    "a length of more": struct.pack("<Q", 80) + bytes(8),
    "no head": struct.pack("<Q", 4) + bytes(4),
    "another coding": _asked(9, 0, b""),
    "slots": _asked(wire.SLOTS, 1, bytes(8)),
    "more than there are": _asked(wire.NUMBERS, 51, bytes(208)),
    "a count without ids": _asked(wire.NUMBERS, 2**32 - 1, b""),
    "too short": _asked(wire.BITMAP, 0, b""),
    "too long": _asked(wire.NUMBERS, 1, bytes(16)),
    "out of range": _asked(wire.NUMBERS, 1, struct.pack("<ii", 50, 0)),
    "negative": _asked(wire.NUMBERS, 1, struct.pack("<ii", -1, 0)),
    "twice": _asked(wire.NUMBERS, 2, struct.pack("<ii", 3, 3)),
    "descending": _asked(wire.NUMBERS, 2, struct.pack("<ii", 3, 2)),
    "a bit too many": _asked(wire.BITMAP, 1, b"\3" + bytes(7)),
    "a bit beyond the rows": _asked(wire.BITMAP, 1, bytes(7) + b"\x80"),
}


@pytest.mark.parametrize("body", MALFORMED.values(), ids=MALFORMED)
def test_a_forged_question_closes_its_connection_only(guarded: Server, body: bytes) -> None:
    for who in ("0" * 32, "1" * 32):
        raw = Raw(guarded.address, who, model=Table(), fetch_rows=True)
        _refused(guarded, raw, body)


def _refused(server: Server, raw: Raw, body: bytes) -> None:
    with pytest.raises(GoneError):
        _answered(raw, body)


@pytest.mark.parametrize("body", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_question_is_not_read(body: bytes) -> None:
    with pytest.raises((FrameError, PayloadError)):
        read_ids(ENTRY, unpack(memoryview(bytearray(body)), 1)[0])


def test_a_question_that_is_too_long_gets_no_room(guarded: Server) -> None:
    raw = Raw(guarded.address, model=Table(), fetch_rows=True)
    raw.send_raw(HEADER.pack(MAGIC, PROTOCOL, Kind.FETCH, 0, 1, 0, 0, 0.0, 8 + most_ids(ENTRY) + 1))
    with pytest.raises(GoneError):
        raw.receive()  # though no body has come


def _answered(raw: Raw, body: bytes) -> None:
    """Ask, and receive an answer."""
    raw.send(Kind.FETCH, body, number=1)
    raw.receive()


@pytest.mark.parametrize("body", [b"", b"".join(bytes(x) for x in pack([asking(ENTRY, IDS.unique())]))])
def test_nobody_fetches_where_rows_come_with_answers(body: bytes) -> None:
    server = started(Table(), thresholded(), make_optimizer=_made)
    with pytest.raises(GoneError):
        _answered(Raw(server.address, model=Table()), body)


@pytest.mark.parametrize("count", [0, 1, 3, 25, 49, 50])
def test_questions_are_read_as_they_were_asked(count: int) -> None:
    keys = torch.randperm(50, generator=torch.Generator().manual_seed(count))[:count].sort().values
    section = asking(ENTRY, keys)
    assert section.numel() <= most_ids(ENTRY)
    assert torch.equal(read_ids(ENTRY, section).long(), keys)


def test_other_rows_than_those_asked_for_are_not_written() -> None:
    rows, answer = Copy(LAYOUT, Table()), pack([table(ENTRY, torch.tensor([1, 2]), torch.ones(2, 4))])
    body = memoryview(bytearray(b"".join(bytes(x) for x in answer)))
    rows.fetched([torch.tensor([1, 2])], body, 0)
    for keys in ([1, 3], [1], [1, 2, 3]):
        with pytest.raises(PayloadError, match=r"2 rows of rows.weight; expected the \d asked for"):
            rows.fetched([torch.tensor(keys)], body, 1)

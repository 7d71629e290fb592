"""Who gets in, and what happens to the rest: their connection is closed, and nothing else."""

import random
import re
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

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
    thresholded,
    warnings,
)
from torch import nn

from thinwire import codecs, recipes
from thinwire.errors import FingerprintError, ServerError, StateError
from thinwire.reducer import PerTensor, Reducer
from thinwire.server import Server, Trainer, connect, serve
from thinwire.server.environment import split
from thinwire.server.frames import HEADER, MAGIC, NONE, PROTOCOL, Flag, FrameError, GoneError, Kind, Wire, parse
from thinwire.server.joining import GREETING, VARIABLE, challenge, respond

SECRET = "hush, and long enough"


def test_a_secret_is_needed_beyond_localhost(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=f"has no secret: pass secret=, or set {VARIABLE}"):
        started(address="0.0.0.0:0")
    monkeypatch.setenv(VARIABLE, SECRET)
    server = started(address="0.0.0.0:0")
    joined(server, address=server.address.replace("0.0.0.0", "127.0.0.1"))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this user's secret will be."""
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "thinwire" / "secret"


def test_at_localhost_processes_of_one_user_share_a_secret_that_others_cannot_read(home: Path) -> None:
    server = started()
    assert home.stat().st_mode & 0o777 == 0o600
    assert len(home.read_text()) == 64
    assert [each.name for each in home.parent.iterdir()] == ["secret"]
    assert joined(server).step()
    for guess in (b"", home.read_bytes()[:-1]):
        wire = Wire(socket.create_connection(split(server.address)), timeout=5.0, limits={})
        with pytest.raises(ServerError, match="has another secret"):
            respond(wire, guess, "here")
        wire.close()
    home.chmod(0o644)
    with pytest.raises(ValueError, match="is not this user's alone: delete it"):
        started()


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize("secret", [b"hunter2 and more than that", "hunter2", ""])
def test_a_secret_that_is_refused_is_not_shown(secret: Any) -> None:
    for use in (started, lambda **given: connect(Vector(), dense(), address="127.0.0.1:9", **given)):
        with pytest.raises((TypeError, ValueError), match=r"secret is (of type bytes|too short); expected") as refused:
            use(secret=secret)
        assert "hunter2" not in str(refused.value)


def test_a_secret_is_in_no_repr() -> None:
    server = started(secret=SECRET)
    trainer = joined(server, secret=SECRET)
    assert SECRET not in f"{server._shared!r} {trainer._channels[0]._settings!r}"


def test_each_side_pings_as_often_as_the_other_needs() -> None:
    server = started(timeout=240.0)
    patient, impatient = joined(server, timeout=100.0), joined(server, timeout=2.0)
    ticks = {each.trainer: each.wire.tick for each in server._shared.sessions.values()}
    for trainer, tick in ((patient, 25.0), (impatient, 0.5)):
        (channel,) = trainer._channels
        assert ticks[channel._settings.trainer] == channel._wire.tick == tick
    (channel,) = joined(started(timeout=4.0), timeout=240.0)._channels
    assert channel._wire.tick == 1.0
    assert Raw(server.address, timeout=4.0).wire.receive().kind is Kind.PING


@pytest.mark.parametrize("wrong", [SECRET.title(), f"{SECRET} ", "quite another secret"])
def test_whoever_does_not_know_the_secret_stays_out(wrong: str) -> None:
    server = started(secret=SECRET)
    with pytest.raises(ServerError, match="has another secret: pass the server's"):
        joined(server, secret=wrong)
    assert joined(server, secret=SECRET).step()


def test_a_server_that_does_not_know_the_secret_is_not_believed() -> None:
    ours, theirs = socket.socketpair()
    trainer, impostor = (Wire(each, timeout=5.0, limits={}) for each in (ours, theirs))
    impostor.send_raw(GREETING + bytes(32) + b"\1" + bytes(32))
    with pytest.raises(ServerError, match="does not know the secret"):
        respond(trainer, SECRET.encode(), "somewhere")
    trainer.close()
    impostor.close()


def _long(density: float) -> Reducer:
    """Return a recipe whose words are longer than a refusal may be."""
    chosen = dict.fromkeys(("large", *map(str, range(9000))), "a")
    return PerTensor(reducers={"a": thresholded(density)}, chosen=chosen, otherwise=dense())


@pytest.mark.parametrize(
    ("options", "told", "logged"),
    [
        ({"recipe": thresholded(density=0.1)}, "recipe differs: ", r"recipe .*density=0\.05.*density=0\.1"),
        ({"recipe": dense()}, "recipe differs: ", "recipe .*TopK.*Identity"),
        ({"down": codecs.TopK(density=0.1)}, "down differs: ", "down .*None.*TopK"),
        ({"model": Vector(numel=201)}, "parameter large differs: ", r"parameter large .*\(200,\).*\(201,\)"),
        ({"model": Vector(dtype=torch.float32)}, "parameter large differs: ", "parameter large .*float64.*float32"),
        ({"model": torch.nn.Linear(2, 2)}, "this trainer lacks something", r"parameter large .*\(200,\).*absent"),
        ({"recipe": _long(0.1)}, "recipe differs: ", r"recipe .*… .*density=0\.05.*… .*density=0\.1"),
    ],
)
def test_a_trainer_of_something_else_is_told_in_what_and_the_server_logs_both_sides(
    options: dict[str, Any], told: str, logged: str, caplog: pytest.LogCaptureFixture
) -> None:
    server = started(recipe=_long(0.05) if "…" in logged else None)
    with pytest.raises(FingerprintError, match=f"{told}.*give it the same as the server") as refused:
        joined(server, **options)
    server.close()  # so that all is logged
    assert re.search(logged, caplog.messages[-1])
    assert "the server has" not in str(refused.value)


def test_a_compiled_model_has_the_names_of_the_plain_one() -> None:
    model, compiled = Vector(), nn.Module()
    compiled._orig_mod = model  # as torch.compile wraps it
    trainer = joined(started(), model=compiled)
    model.give(gradients(1)[0])
    assert trainer.step()


def test_a_recipe_without_a_codec_is_refused() -> None:
    with pytest.raises(TypeError, match="computes while it exchanges"):
        started(model=nn.Linear(64, 64), recipe=recipes.powersgd(start=0, minimum_size=0))


def test_no_server_is_a_clear_error() -> None:
    server = started()
    server.close()
    with pytest.raises(
        ServerError, match=r"no server of this version of thinwire at 127.0.0.1:\d+ .*start it first, or"
    ):
        joined(server)


def _steps(trainer: Trainer) -> None:
    for _ in range(3):
        trainer.step()


def test_a_server_that_dies_ends_its_trainers() -> None:
    server = started()
    trainer = joined(server)
    server.close()
    with pytest.raises(ServerError, match=r"is gone .*start it again from its checkpoint, and pass reconnect="):
        _steps(trainer)


def test_a_server_without_its_checkpoint_is_not_taken_for_the_old_one(tmp_path: Path) -> None:
    server, model = started(), Vector()
    trainer = joined(server, model=model, reconnect=30.0)
    model.give(gradients(1)[0])
    trainer.step()
    server.close()
    again = started(address=server.address)
    with pytest.raises(ServerError, match="has applied 0 updates of this trainer, and had saved 1"):
        _steps(trainer)
    again.close()


def test_a_checkpoint_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "server.pt"
    started(checkpoint=path).close()
    with pytest.raises(StateError, match=r"parameter large is \(200,\) torch.float64 in the checkpoint and \(201,\)"):
        started(Vector(numel=201), checkpoint=path)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(StateError, match="is no checkpoint of a server"):
        started(checkpoint=path)


@pytest.fixture
def guarded(caplog: pytest.LogCaptureFixture) -> Iterator[Server]:
    """A server that must stand where it stood, and go on with its trainers."""
    central, model = Vector(), Vector()
    server = started(central)
    trainer = joined(server, model=model)
    model.give(gradients(1)[0])
    trainer.step()
    before = central.large.detach().clone()
    yield server
    assert torch.equal(before, central.large)
    assert server.status().version == 1
    model.give(gradients(1)[0])
    assert trainer.step()
    assert len(warnings(caplog)) <= 1


def _framed(kind: int, body: bytes = b"", *, number: int = 1, length: int | None = None, magic: bytes = MAGIC) -> bytes:
    return HEADER.pack(magic, PROTOCOL, kind, 0, number, 0, len(body) if length is None else length) + body


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        bytes(1000),
        GREETING + bytes(31),
        GREETING + bytes(32),
        GREETING + bytes(64),
        _framed(Kind.UPDATE, bytes(100)),
    ],
)
def test_a_strangers_bytes_close_its_connection_only(guarded: Server, data: bytes) -> None:
    for _ in range(3):
        host, port = guarded.address.split(":")
        with socket.create_connection((host, int(port))) as stranger:
            stranger.settimeout(20.0)
            with suppress(ConnectionError, OSError):
                stranger.sendall(data)
                stranger.shutdown(socket.SHUT_WR)
                while stranger.recv(4096):
                    pass


@pytest.mark.parametrize(
    "data",
    [
        _framed(Kind.UPDATE, length=1 << 40),
        _framed(Kind.UPDATE, b"x"),
        _framed(Kind.UPDATE, struct.pack("<QQ", 1 << 63, 1 << 63)),
        _framed(Kind.UPDATE, struct.pack("<QQ", 8, 8) + bytes(16)),
        _framed(Kind.UPDATE, struct.pack("<QQ", 0, 0)),
        _framed(Kind.UPDATE, number=7),
        _framed(Kind.PING, b"x"),
        _framed(Kind.JOIN, b"{}"),
        _framed(Kind.WELCOME),
        _framed(99),
        _framed(Kind.PING, magic=b"abcd"),
        bytes(HEADER.size),
    ],
)
def test_a_malformed_frame_changes_nothing(guarded: Server, data: bytes) -> None:
    raw = Raw(guarded.address)
    raw.wire.send_raw(data)
    with pytest.raises(GoneError):
        _read_on(raw)


def _read_on(raw: Raw) -> None:
    while True:
        raw.wire.receive()


def test_a_damaged_update_changes_nothing(guarded: Server) -> None:
    chance, gradient = random.Random(0), gradients(1)[0]
    for i in range(20):
        raw = Raw(guarded.address, who=f"{i:032}")
        body = bytearray(b"".join(raw.body(1, gradient)))
        for _ in range(3):
            body[chance.randrange(8, 40)] ^= 1 << chance.randrange(8)  # lengths and headers
        raw.wire.send(Kind.UPDATE, bytes(body), number=1)
        with pytest.raises(GoneError):
            raw.wire.receive()


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"trainer": "0"}', b"\xff" * 9, b"[" * 100_000])
def test_a_malformed_request_to_join_changes_nothing(guarded: Server, body: bytes) -> None:
    host, port = guarded.address.split(":")
    wire = Wire(socket.create_connection((host, int(port))), timeout=20.0, limits=dict.fromkeys(Kind, 1 << 20))
    respond(wire, guarded._shared.secret, guarded.address)
    wire.send(Kind.JOIN, body)
    with pytest.raises(GoneError):
        wire.receive()
    wire.close()


def test_headers_are_read_or_refused() -> None:
    limits = {Kind.PING: 0, Kind.UPDATE: 10}
    assert parse(_framed(Kind.UPDATE, length=10)[:32], limits) == (Kind.UPDATE, NONE, 1, 0, 10)
    flagged = HEADER.pack(MAGIC, PROTOCOL, Kind.UPDATE, Flag.SAVE | Flag.DRAINED, 1, 2, 3)
    assert parse(flagged, limits) == (Kind.UPDATE, Flag.SAVE | Flag.DRAINED, 1, 2, 3)
    for wrong in (
        _framed(Kind.UPDATE, length=11),
        _framed(Kind.PING, length=1),
        _framed(Kind.WELCOME),
        HEADER.pack(MAGIC, PROTOCOL + 1, Kind.PING, 0, 0, 0, 0),
        HEADER.pack(MAGIC, PROTOCOL, Kind.PING, 16, 0, 0, 0),
    ):
        with pytest.raises(FrameError):
            parse(wrong[:32], limits)


def test_silence_ends_a_connection() -> None:
    ours, theirs = socket.socketpair()
    wire, silent = (Wire(each, timeout=0.2, limits={Kind.PING: 0}) for each in (ours, theirs))
    with pytest.raises(GoneError, match=r"nothing was heard for 0.2 s"):
        wire.receive()
    for each in (wire, silent):
        each.close()


def test_asking_whether_the_other_side_is_gone_does_not_wait() -> None:
    ours, theirs = socket.socketpair()
    mine, other = (Wire(each, timeout=240.0, limits={}) for each in (ours, theirs))
    assert not mine.gone()
    other.ping()
    assert not mine.gone()
    other.close()
    assert not mine.gone()  # there is still something to read
    mine.receive_raw(memoryview(bytearray(HEADER.size)))
    assert mine.gone()
    mine.close()
    assert mine.gone()


def test_both_sides_prove_that_they_know_the_secret() -> None:
    ours, theirs = socket.socketpair()
    trainer, server = (Wire(each, timeout=5.0, limits={}) for each in (ours, theirs))

    other = threading.Thread(target=challenge, args=(server, SECRET.encode()))
    other.start()
    respond(trainer, SECRET.encode(), "here")
    other.join()
    for each in (trainer, server):
        each.close()


def test_more_servers_than_parameters_are_refused() -> None:
    with pytest.raises(ValueError, match="3 servers for 2 parameters"):
        started(servers=3, index=0)
    with pytest.raises(ValueError, match="this is server 2 of 2"):
        started(servers=2, index=2)
    with pytest.raises(ValueError, match="address is 'here'; expected host:port"):
        serve(Vector(), dense(), make_optimizer=torch.optim.SGD, address="here")


def test_what_came_while_this_process_slept_is_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    mine, other = (Wire(each, timeout=0.2, limits=dict.fromkeys(Kind, 8)) for each in (ours, theirs))
    receive, sleeps = ours.recv_into, iter([True])

    def sleeping(into: memoryview) -> int:
        if next(sleeps, False):
            other.send(Kind.BYE)
            mine._heard -= 100.0
            raise TimeoutError
        return receive(into)

    monkeypatch.setattr(mine, "_socket", _Receiving(ours, sleeping))
    assert mine.receive().kind is Kind.BYE
    mine.close()
    other.close()


class _Receiving:
    """A socket with another `recv_into`."""

    def __init__(self, inner: socket.socket, recv_into: Any) -> None:
        self._inner, self.recv_into = inner, recv_into

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def test_bytes_count_once_when_a_server_is_gone() -> None:
    server = started()
    model = Vector()
    trainer = joined(server, model=model)
    for gradient in gradients(3):
        model.give(gradient)
        trainer.step()
    before = trainer.traffic()
    server.close()
    model.give(gradients(1)[0])
    with pytest.raises(ServerError, match="is gone"):
        _ = [trainer.step() for _ in range(3)]  # the first may still be under way
    after = trainer.traffic()
    pairs = ((before.sent_bytes, after.sent_bytes), (before.received_bytes, after.received_bytes))
    assert all(earlier <= later < 2 * earlier for earlier, later in pairs)

"""Who gets in, and what happens to the rest: their connection is closed, and nothing else."""

import json
import os
import random
import re
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from fcntl import F_DUPFD_CLOEXEC, fcntl
from pathlib import Path
from typing import Any

import pytest
import torch
from served import (
    NUMEL,
    Proxy,
    Raw,
    Vector,
    closed,  # noqa: F401 - a fixture
    connections,
    dense,
    gradients,
    joined,
    soon,
    started,
    swapped,
    thresholded,
    warnings,
)
from torch import nn
from torch._C._distributed_c10d import HashStore, TCPStore

from thinwire import codecs, recipes
from thinwire.errors import FingerprintError, ServerError, StateError
from thinwire.reducer import PerTensor, Reducer
from thinwire.server import Server, Trainer, connect, serve
from thinwire.wire import rendezvous, sockets
from thinwire.wire.frames import (
    AROUND,
    HEADER,
    MAGIC,
    PIECE,
    PROTOCOL,
    Flag,
    FrameError,
    GoneError,
    Kind,
    Talk,
    numbered,
    parse,
)
from thinwire.wire.rendezvous import VARIABLE, key_of, ticket
from thinwire.wire.sockets import SECRET


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where servers leave tickets."""
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "thinwire" / "tickets" / socket.gethostname()


def test_on_one_host_this_users_trainers_find_a_ticket_that_others_cannot_read(home: Path) -> None:
    server = started()
    (left,) = home.iterdir()
    assert left.name == server.address
    assert left.stat().st_mode & 0o777 == 0o600
    assert home.stat().st_mode & 0o777 == 0o700
    assert joined(server).step()
    left.chmod(0o644)
    with pytest.raises(ValueError, match="can be read by other users"):
        joined(server, ticket=None)
    left.chmod(0o600)
    server.close()
    assert not list(home.iterdir())


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize(
    ("listens", "called"),
    [
        ("0.0.0.0", "localhost"),
        ("0.0.0.0", "127.0.0.2"),  # as any address of this host
        ("0.0.0.0", "0.0.0.0"),
        ("127.0.0.1", "0.0.0.0"),
        ("localhost", "127.0.0.1"),
        ("[::]", "127.0.0.2"),
        ("[::]", "[::1]"),
        ("[::1]", "[::]"),
    ],
)
def test_a_ticket_is_found_by_every_address_of_the_server(listens: str, called: str) -> None:
    server = started(address=f"{listens}:0")
    assert joined(server, address=f"{called}:{server.address.rpartition(':')[2]}", ticket=None).step()


@pytest.mark.usefixtures("home")
def test_a_ticket_is_not_for_another_host() -> None:
    port = started(address="0.0.0.0:0").address.rpartition(":")[2]
    with pytest.raises(GoneError, match="no ticket"):
        ticket("", f"192.0.2.1:{port}", 0, seconds=0.1)


@pytest.mark.parametrize("listens", ["127.0.0.1", "0.0.0.0", "[::]"])
def test_tickets_of_dead_servers_and_of_other_hosts_are_not_taken_for_a_new_one(
    home: Path, listens: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with started() as dead:
        port = dead.address.rpartition(":")[2]
    others = ["127.0.0.1", "127.0.0.2", "[::1]", "[::]", "0.0.0.0"]
    for name in others:
        (home / f"{name}:{port}").touch(mode=0o600)
    alive = started(address=f"127.0.0.3:{port}") if listens == "127.0.0.1" else None
    server = started(address=f"{listens}:{port}")
    assert alive is None or joined(alive, ticket=None).step()
    called = {"127.0.0.1": ["127.0.0.1", "0.0.0.0"], "0.0.0.0": ["127.0.0.1", "127.0.0.2"], "[::]": others}
    for name in called[listens]:
        assert joined(server, address=f"{name}:{port}", ticket=None).step()
    monkeypatch.setattr(socket, "gethostname", lambda: "another-one-that-has-the-same-home")
    with pytest.raises(GoneError, match="no ticket"):
        ticket("", server.address, 0, seconds=0.1)


def test_a_key_is_made_beside_the_checkpoint_and_kept(home: Path, tmp_path: Path) -> None:
    for _ in range(2):
        server = started(checkpoint=tmp_path / "server.pt", address="0.0.0.0:0")
        address = server.address.replace("0.0.0.0", "127.0.0.1")
        for given in (server.ticket, tmp_path / "server.pt.key.ticket", None):
            assert joined(server, address=address, ticket=given).step()
        server.close()
        files = [tmp_path / name for name in ("server.pt.key", "server.pt.key.ticket")]
        assert all(each.stat().st_mode & 0o777 == 0o600 for each in files)
        own, theirs = (each.read_text() for each in files)
        assert theirs == server.ticket
        assert own.removeprefix(SECRET)[:64] not in theirs  # a trainer cannot be taken for the server
    files[0].chmod(0o640)
    for content in (own, ""):
        files[0].write_text(content)
        with pytest.raises(ValueError, match="can be read by other users"):
            started(checkpoint=tmp_path / "server.pt")
        assert files[0].read_text() == content  # no key is written where others may read it


@pytest.mark.usefixtures("home")
def test_a_ticket_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    servers = [started(servers=2, index=i) for i in range(2)]
    monkeypatch.setenv(VARIABLE, ",".join(each.ticket for each in servers))
    assert joined(servers[0], address=[each.address for each in servers], servers=2, ticket=None).step()
    with pytest.raises(ValueError, match="2 tickets for 1 servers"):
        joined(servers[0], ticket=None)


def test_a_key_is_made_where_there_are_no_hard_links_and_after_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.link", lambda *_: (_ for _ in ()).throw(PermissionError(1, "Operation not permitted")))
    (tmp_path / "server.pt.key").touch(mode=0o600)  # which a killed server has not written
    server = started(checkpoint=tmp_path / "server.pt")
    assert joined(server, ticket=tmp_path / "server.pt.key.ticket").step()
    with ThreadPoolExecutor(8) as pool:
        assert len({each.text for each in pool.map(key_of, [tmp_path / "shared"] * 8)}) == 1


@pytest.mark.parametrize(("address", "stores"), [(None, [HashStore]), ("10.0.0.1:9", [HashStore]), (None, [])])
def test_torchruns_store_is_asked_no_longer_than_told(
    address: str | None, stores: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}
    for name, value in (told | {"TORCHELASTIC_USE_AGENT_STORE": "True"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(rendezvous, "_stores", [each() for each in stores])
    with pytest.raises(ServerError, match=r"torchrun's store within 0\.1 s: start it first"):
        connect(Vector(), dense(), address=address, timeout=0.1)


def test_a_job_that_torchrun_starts_again_finds_no_earlier_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setattr(rendezvous, "_stores", [store])
    monkeypatch.setattr(rendezvous, "_announced", set())
    for attempt in ("0", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
        with pytest.raises(ServerError, match=r"torchrun's store within 0\.1 s"):
            rendezvous.addresses(None, 1, 0.1)
        rendezvous.announce("address", 0, f"localhost:{attempt}")
        for seconds in (0.1, 1e10, 1e300):
            assert rendezvous.addresses(None, 1, seconds) == [f"localhost:{attempt}"]


FORGED = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, bytes(1)) + b"\x01" + bytes(31)
"""What a ZMTP server says first."""


def test_an_error_that_nobody_vouches_for_is_tried_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    key, made = tmp_path / "key", key_of(tmp_path / "key")
    door = socket.create_server(("127.0.0.1", 0))
    address = f"127.0.0.1:{door.getsockname()[1]}"

    def lie() -> None:
        for _ in range(3):
            with suppress(OSError), door.accept()[0] as caller:
                caller.sendall(FORGED)
                caller.recv(64 + 200, socket.MSG_WAITALL)  # the same of a trainer, and its HELLO
                caller.sendall(b"\x04\x0a\x05ERROR\x03400")
                while caller.recv(4096):
                    pass
        door.close()
        started(address=address, key=key)

    with ThreadPoolExecutor() as pool:
        lying = pool.submit(lie)
        with connect(Vector(), thresholded(), address=address, ticket=made.ticket.text, reconnect=60.0) as trainer:
            assert trainer.step()
        lying.result()
    assert re.search(
        r"does not know this trainer's ticket: .*pass this one's server.ticket .*trying again", caplog.text
    )
    with pytest.raises(ServerError, match="does not know this trainer's ticket"):
        connect(Vector(), thresholded(), address=address, ticket=made.ticket.text[:64] + made.text[:64], reconnect=0.5)


@pytest.mark.parametrize("same", ["", "server"])
def test_the_error_for_a_wrong_ticket_says_why_and_what_to_do(same: str) -> None:
    server, other = started(), key_of(None).ticket.text
    with pytest.raises(ServerError, match=r"of another server, or of an earlier start.*server\.ticket.*key=") as wrong:
        joined(server, ticket=server.ticket[:64] + other[64:] if same else other)
    assert "start it first" not in str(wrong.value)


def test_the_error_for_a_silent_server_says_that_it_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "_HANDSHAKE", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = sockets.joint(*silent.getsockname())
        with pytest.raises(ServerError, match=r"not answered.* stopped.*reconnect=.* address; .*server\.ticket.*key="):
            connect(Vector(), dense(), address=address, ticket=key_of(None).ticket.text)


def test_the_error_for_a_server_that_is_killed_in_the_handshake_says_what_is_known() -> None:
    with socket.create_server(("127.0.0.1", 0)) as door, ThreadPoolExecutor() as pool:

        def die() -> None:
            with door.accept()[0] as caller:
                caller.sendall(FORGED)
                caller.recv(64 + 200, socket.MSG_WAITALL)  # the same of a trainer, and its HELLO
                caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # so: a reset

        dying, address = pool.submit(die), sockets.joint(*door.getsockname())
        with pytest.raises(ServerError, match=r"broke before.*has ended or was started again.*reconnect=.*another key"):
            connect(Vector(), dense(), address=address, ticket=key_of(None).ticket.text)
        dying.result()


def test_a_ticket_is_told_from_a_file_by_what_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server, name = started(), "t" * 128
    (tmp_path / name).touch(mode=0o600)
    (tmp_path / name).write_text(server.ticket)
    monkeypatch.chdir(tmp_path)
    assert joined(server, ticket=name).step()
    with pytest.raises(ValueError, match="the ticket holds no key or ticket"):
        joined(server, ticket=server.ticket[:-1])
    with pytest.raises(TypeError, match="of type bytes; expected a str"):
        joined(server, ticket=server.ticket.encode())
    key_of(tmp_path / "key")
    for given, named in (("key", "key"), ((tmp_path / "key").read_text(), "the ticket")):
        with pytest.raises(ValueError, match=rf"^{named} is the server's own key.*expected its ticket: .*\.ticket$"):
            joined(server, ticket=given)
    for given in ((tmp_path / "key").read_text(), server.ticket, server.ticket[:-1], f" {server.ticket}\n"):
        with pytest.raises(ValueError, match=r"^key is a key or a ticket; expected a file that holds") as refused:
            started(key=given)
        assert given.strip()[-32:] not in str(refused.value)
    with pytest.raises(
        ValueError, match=r"key\.ticket holds a ticket, .*expected the server's key: .*without \.ticket$"
    ):
        started(key=f"{tmp_path}/key.ticket")
    assert {each.name for each in tmp_path.iterdir()} == {name, "key", "key.ticket"}


def test_no_ticket_is_shown(home: Path, tmp_path: Path) -> None:
    server = started()
    trainer = joined(server)
    shown = f"{server._hub!r} {trainer._channels[0]._settings!r} {key_of(None)!r} {key_of(None).ticket!r}"
    assert server.ticket[64:] not in shown
    (tmp_path / "ticket").write_text(server.ticket[:-1])
    (tmp_path / "ticket").chmod(0o600)
    with pytest.raises(ValueError, match="holds no key or ticket") as refused:
        joined(server, ticket=tmp_path / "ticket")
    assert server.ticket[:32] not in str(refused.value)
    joined(server, ticket=f" {server.ticket}\n")
    with pytest.raises(ServerError, match="no ticket for this server") as lost:
        joined(server, ticket=f"{server.ticket[:-1]}g", timeout=1.0)
    assert server.ticket[:32] not in f"{lost.value!r} {lost.value.__cause__!r} {lost.value.__context__!r}"


@pytest.mark.parametrize("which", ["the trainers' key", "the server's key", "no ticket"])
def test_a_local_user_without_the_key_gets_nothing(
    which: str, guarded: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # another user's
    right, wrong = guarded.ticket, key_of(None).ticket.text
    forged = {"the trainers' key": right[:64] + wrong[64:], "the server's key": wrong[:64] + right[64:]}.get(which)
    with pytest.raises(
        ServerError, match=r"does not know this trainer's ticket|it has another key|no ticket for this server"
    ):
        joined(guarded, ticket=forged)
    assert len(guarded.status().trainers) == 1


def test_a_server_that_does_not_have_the_key_is_not_believed() -> None:
    impostor, known = started(), key_of(None)
    with pytest.raises(ServerError, match=r"broke before the keys were checked: .*it has another key: "):
        joined(impostor, ticket=known.ticket.text)


SPOILS: dict[str, Callable[[random.Random, bytes], bytes]] = {
    "altered": lambda chance, data: _altered(data, chance.randrange(len(data))),
    "dropped": lambda chance, data: data[: chance.randrange(len(data))],
    "repeated": lambda chance, data: data * 2,
    "reordered": lambda chance, data: data[len(data) // 2 :] + data[: len(data) // 2],
}


def _altered(data: bytes, place: int) -> bytes:
    return data[:place] + bytes([data[place] ^ 0x10]) + data[place + 1 :]


@pytest.mark.parametrize("how", SPOILS)
def test_whoever_changes_what_passes_breaks_the_connection_and_nothing_else(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "_HANDSHAKE", 0.5)
    central, model, chance, spoiling = Vector(), Vector(), random.Random(0), threading.Event()

    def spoil(data: bytes) -> bytes:
        if not spoiling.is_set() or chance.random() < 0.7:
            return data
        spoilt.append(1)
        return SPOILS[how](chance, data)

    spoilt: list[int] = []
    server = started(central, dense(), timeout=0.5)
    proxy = Proxy(server.address, spoil)
    trainer = joined(server, dense(), model, address=proxy.address, ticket=server.ticket, reconnect=60.0, timeout=0.5)
    steps = gradients(12)
    for i, gradient in enumerate(steps):
        spoiling.set() if i % 2 else spoiling.clear()
        model.give(gradient)
        stuck = threading.Thread(target=trainer.step, daemon=True)
        stuck.start()
        assert soon(lambda stuck=stuck: bool(spoilt) or not stuck.is_alive())  # type: ignore[misc]
        spoiling.clear()
        stuck.join(60)
        assert torch.equal(model.large, central.large)
    assert spoilt
    torch.testing.assert_close(-central.large, sum(steps))
    assert list(server.status().updates.values()) == [12]


@pytest.mark.grid
@pytest.mark.parametrize("in_flight", [0, 2])
@pytest.mark.parametrize("up", [True, False])
@pytest.mark.parametrize(
    ("numel", "longer", "which"),
    [
        pytest.param(NUMEL, 100, 1, id="the first"),
        pytest.param(NUMEL, 100, 6, id="an update or answer"),
        pytest.param(NUMEL, 100, 13, id="the last"),
        pytest.param(3 * PIECE // 8, 40, 25, id="anything"),
        pytest.param(3 * PIECE // 8, PIECE, 8, id="a piece"),
    ],
)
def test_a_message_that_is_lost_is_noticed(numel: int, longer: int, which: int, up: bool, in_flight: int) -> None:
    """`longer`, in bytes, are the messages of which one is left out."""
    found: list[int] = []

    def drops(upwards: bool, length: int) -> bool:
        if upwards is up and length > longer:
            found.append(length)
            return len(found) == which
        return False

    central, model = Vector(numel), Vector(numel)
    server = started(central, dense(), timeout=1.0)
    proxy = Proxy(server.address, drops=drops)
    options: dict[str, Any] = {"reconnect": 60.0, "timeout": 1.0, "in_flight": in_flight}

    def train() -> None:
        trainer = joined(server, dense(), model, address=proxy.address, ticket=server.ticket, **options)
        for i in range(12):
            model.give(torch.full((numel,), 2.0**i, dtype=torch.float64))
            trainer.step()
        settled.append(trainer.settle(30.0))
        trainer.close()  # so that the model has what has come

    settled: list[bool] = []
    thread = threading.Thread(target=train, daemon=True)
    thread.start()
    thread.join(60)
    assert settled == [True]
    assert len(found) >= which
    assert torch.equal(central.large, torch.full_like(central.large, 1 - 2.0**12))
    assert list(server.status().updates.values()) == [12]
    assert torch.equal(model.large, central.large)


def test_without_pyzmq_both_sides_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "zmq", None)
    for call in (started, lambda: connect(Vector(), dense(), address="127.0.0.1:9")):
        with pytest.raises(ImportError, match=re.escape("pip install 'thinwire[server]'")):
            call()


@pytest.mark.slow
def test_without_pyzmq_the_library_works() -> None:
    program = """
import sys
sys.modules["zmq"] = None
import thinwire.trainer, torch
print([name for name in sys.modules if name.startswith("thinwire.server")])
for call in (thinwire.serve, thinwire.connect):
    options = {"make_optimizer": torch.optim.SGD} if call is thinwire.serve else {}
    try:
        call(torch.nn.Linear(2, 2), thinwire.recipes.dense(), address="127.0.0.1:9", **options)
    except ImportError as error:
        print(error)
"""
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert said.startswith("[]\n")  # a trainer loads nothing of the server's
    assert said.count("pip install 'thinwire[server]'") == 2


def _long(density: float) -> Reducer:
    """Return a recipe whose words are longer than a refusal may be."""
    reducers = {"a": thresholded(density), **dict.fromkeys(map(str, range(300)), dense())}
    return PerTensor(reducers=reducers, chosen={"large": "a"}, otherwise=dense())


def test_a_recipe_that_names_what_the_model_lacks_is_refused_by_both_sides() -> None:
    recipe, server = PerTensor(reducers={"a": dense()}, chosen={"larger": "a"}, otherwise=dense()), started()
    with pytest.raises(ValueError, match=r"'larger', which the model lacks.*such as large"):
        started(recipe=recipe)
    with pytest.raises(ValueError, match=r"'larger', which the model lacks.*such as large"):
        joined(server, recipe)


@pytest.mark.parametrize(
    ("options", "differs"),
    [
        ({"recipe": thresholded(density=0.1)}, r"recipe .*density=0\.05.*density=0\.1"),
        ({"recipe": dense()}, "recipe .*TopK.*Identity"),
        ({"down": codecs.TopK(density=0.1)}, "down .*None.*TopK"),
        ({"model": Vector(numel=201)}, r"parameter large .*\(200,\).*\(201,\)"),
        ({"model": Vector(dtype=torch.float32)}, "parameter large .*float64.*float32"),
        ({"model": torch.nn.Linear(2, 2)}, r"parameter large .*\(200,\).*absent"),
        ({"model": swapped()}, "the order of parameters .*parameter large.*parameter small"),
        ({"recipe": _long(0.1)}, r"recipe .*… .*density=0\.05.*… .*density=0\.1"),
    ],
)
def test_a_trainer_of_something_else_is_told_both_sides_and_the_server_logs_them(
    options: dict[str, Any], differs: str, caplog: pytest.LogCaptureFixture
) -> None:
    server = started(recipe=_long(0.05) if "…" in differs else None)
    with pytest.raises(FingerprintError, match=f"{differs}.*; use the server's$"):
        joined(server, **options)
    server.close()  # so that all is logged
    assert re.search(differs, caplog.text)


def test_a_compiled_model_has_the_names_of_the_plain_one() -> None:
    model, compiled = Vector(), nn.Module()
    compiled._orig_mod = model  # as torch.compile wraps it
    trainer = joined(started(), model=compiled)
    model.give(gradients(1)[0])
    assert trainer.step()


def test_a_recipe_without_a_codec_is_refused() -> None:
    with pytest.raises(TypeError, match="computes during its exchange"):
        started(model=nn.Linear(64, 64), recipe=recipes.powersgd(start=0, minimum_size=0))


def test_a_host_that_is_not_known_is_named() -> None:
    told = r"no such host:9 cannot be found \(.*check the address"
    with pytest.raises(OSError, match=told):
        started(address="no such host:9")
    with pytest.raises(ServerError, match=told):
        connect(Vector(), dense(), address="no such host:9")


def test_no_server_is_a_clear_error() -> None:
    server = started()
    server.close()
    for given, why in (
        (None, r"no ticket for this server.*start it first, or pass reconnect="),
        (server.ticket, r"nobody listens there.*start it first, with this version of thinwire, or"),
    ):
        with pytest.raises(ServerError, match=rf"cannot join a server at 127.0.0.1:\d+.*{why}"):
            joined(server, ticket=given)


def _steps(trainer: Trainer) -> None:
    for _ in range(3):
        trainer.step()


def test_a_server_that_dies_ends_its_trainers() -> None:
    server = started()
    trainer = joined(server)
    server.close()
    with pytest.raises(ServerError, match=r"is gone.*start it again from its checkpoint, and pass reconnect="):
        _steps(trainer)


def test_a_server_without_its_checkpoint_is_not_taken_for_the_old_one(tmp_path: Path) -> None:
    server, model = started(), Vector()
    trainer = joined(server, model=model, reconnect=30.0)
    model.give(gradients(1)[0])
    trainer.step()
    server.close()
    again = started(address=server.address)
    with pytest.raises(ServerError, match="has applied 0 updates of this trainer, fewer than the 1"):
        _steps(trainer)
    again.close()


def test_a_checkpoint_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "server.pt"
    started(checkpoint=path).close()
    with pytest.raises(StateError, match=r"parameter large is \(200,\) torch.float64 in the checkpoint and \(201,\)"):
        started(Vector(numel=201), checkpoint=path)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(StateError, match="is not a server's checkpoint"):
        started(checkpoint=path)


@pytest.fixture
def guarded(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A server that must stand where it stood, and go on with its trainers."""
    monkeypatch.setattr(sockets, "_LINGER", 0.05)  # what is malformed is answered, and closed after that
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
    return HEADER.pack(magic, PROTOCOL, kind, 0, number, 0, 0, 0.0, len(body) if length is None else length) + body


@pytest.mark.parametrize("data", [b"", b"GET / HTTP/1.1\r\n\r\n", bytes(1000), b"\xff" + bytes(8) + b"\x7f\x03"])
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
        _framed(Kind.WATCH),
        _framed(99),
        _framed(Kind.PING, magic=b"abcd"),
        bytes(HEADER.size),
        b"",
        _framed(Kind.UPDATE, bytes(100), length=50),
    ],
)
def test_a_malformed_frame_changes_nothing(guarded: Server, data: bytes) -> None:
    raw = Raw(guarded.address)
    raw.send_raw(data)
    with pytest.raises(GoneError):
        raw.receive()
    assert soon(lambda: connections(guarded.address) == 1)  # it is closed, though its owner is not gone


def test_a_name_that_is_no_text_is_refused_like_another(guarded: Server) -> None:
    raw = Raw(guarded.address, join=False)
    said = json.loads(raw.said)
    said["agreed"] |= {"\ud800": "half a character"}
    raw.send(Kind.JOIN, json.dumps(said).encode())
    with pytest.raises(GoneError, match="differs: the server has absent, this trainer has half a character"):
        raw.receive()


def _socketpair() -> tuple[int, int]:
    one, other = socket.socketpair()
    return one.detach(), other.detach()


@pytest.mark.parametrize("pair", [_socketpair, os.pipe])
def test_a_descriptor_that_is_anothers_by_now_is_left_alone(
    pair: Callable[[], tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, come, closed_again, ended = started(), threading.Event(), threading.Event(), threading.Event()
    listener, (reader, ours) = server._hub.listener, pair()
    receive, end = listener.receive, listener.end

    def slowly() -> tuple[bytes, memoryview, str, int] | None:
        if (found := receive()) is not None:
            come.set()
            assert closed_again.wait(60)
        return found

    def noted(*call: Any) -> None:
        end(*call)
        ended.set()

    monkeypatch.setattr(listener, "receive", slowly)
    monkeypatch.setattr(listener, "end", noted)
    raw = Raw(server.address, join=False)
    raw.send_raw(b"malformed")
    assert come.wait(60)
    port = int(server.address.rpartition(":")[2])
    (its,) = (number for number, each in sockets.open_sockets() if _connected(each, port))
    raw.close()
    assert soon(lambda: not connections(server.address))
    assert fcntl(ours, F_DUPFD_CLOEXEC, its) == its
    closed_again.set()
    assert ended.wait(60)
    assert soon(lambda: not listener._ending)
    server.close()
    os.set_blocking(reader, False)
    with pytest.raises(BlockingIOError):  # it was not shut down
        os.read(reader, 1)
    for each in (ours, its):
        os.close(each)
    assert os.read(reader, 1) == b""  # nobody else has a copy
    os.close(reader)


def _connected(each: socket.socket, port: int) -> bool:
    return each.getsockname()[1] == port and not each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)


def test_a_message_longer_than_a_piece_breaks_the_connection(guarded: Server) -> None:
    raw = Raw(guarded.address)
    raw.send_raw(bytes(HEADER.size + PIECE + AROUND + 1))
    with pytest.raises(GoneError, match="the connection was closed"):
        raw.receive()


def test_a_damaged_update_changes_nothing(guarded: Server) -> None:
    chance, gradient = random.Random(0), gradients(1)[0]
    for i in range(20):
        raw = Raw(guarded.address, who=f"{i:032}")
        body = bytearray(b"".join(raw.body(1, gradient)))
        for _ in range(3):
            body[chance.randrange(8, 40)] ^= 1 << chance.randrange(8)  # lengths and headers
        raw.send(Kind.UPDATE, bytes(body), number=1)
        with pytest.raises(GoneError):
            raw.receive()


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"trainer": "0"}', b"\xff" * 9, b"[" * 100_000])
def test_a_malformed_request_to_join_changes_nothing(guarded: Server, body: bytes) -> None:
    raw = Raw(guarded.address, join=False)
    raw.send(Kind.JOIN, body)
    with pytest.raises(GoneError):
        raw.receive()


def test_a_request_that_says_more_than_it_must_is_refused(guarded: Server) -> None:
    raw = Raw(guarded.address, join=False)
    said = json.loads(raw.said)
    raw.send(Kind.JOIN, json.dumps(said | {"agreed": said["agreed"] | {"x": "absent"}}).encode())
    with pytest.raises(GoneError, match="x differs"):
        raw.receive()


def test_both_sides_name_the_versions_when_they_differ(guarded: Server, caplog: pytest.LogCaptureFixture) -> None:
    raw, words = Raw(guarded.address, join=False), f"protocol {PROTOCOL + 1}; expected .*, protocol {PROTOCOL}"
    raw.send_raw(HEADER.pack(MAGIC, PROTOCOL + 1, Kind.JOIN, 0, 0, 0, 0, 0.0, 0))
    with pytest.raises(GoneError, match=words):
        raw.receive()
    assert re.search(words, caplog.text)


@pytest.mark.parametrize("sizes", [(0,), (10,), (PIECE,), (PIECE + 1,), (3, 2 * PIECE + 5, 0, PIECE)])
def test_bodies_come_whole_in_pieces_of_bounded_length(sizes: tuple[int, ...]) -> None:
    body = [random.Random(i).randbytes(size) for i, size in enumerate(sizes)]
    here, there, found = Talk({}), Talk({Kind.UPDATE: sum(sizes)}), list[Any]()
    here.say(Kind.UPDATE, *(memoryview(x) for x in body), number=7)
    for number, each in enumerate(here.outbox):
        assert len(each) <= HEADER.size + PIECE
        assert not any(found)
        found.append(there.take(numbered(each, number)))
    assert (found[-1].number, bytes(found[-1].body)) == (7, b"".join(body))


def test_headers_are_read_or_refused() -> None:
    limits = {Kind.PING: 0, Kind.UPDATE: 10}
    plain = _framed(Kind.UPDATE, length=10)[: HEADER.size]
    assert [*parse(plain, limits)] == [Kind.UPDATE, Flag(0), 1, 0, 0, 0.0, bytes(10)]
    flagged = HEADER.pack(MAGIC, PROTOCOL, Kind.UPDATE, Flag.SAVE | Flag.DRAINED, 1, 2, 3, 1.5, 4)
    assert [*parse(flagged, limits)] == [Kind.UPDATE, Flag.SAVE | Flag.DRAINED, 1, 2, 3, 1.5, bytes(4)]
    for wrong in (
        _framed(Kind.UPDATE, length=11),
        _framed(Kind.PING, length=1),
        _framed(Kind.WATCH),
        HEADER.pack(MAGIC, PROTOCOL + 1, Kind.PING, 0, 0, 0, 0, 0.0, 0),
        HEADER.pack(MAGIC, PROTOCOL, Kind.PING, 32, 0, 0, 0, 0.0, 0),
    ):
        with pytest.raises(FrameError):
            parse(wrong[: HEADER.size], limits)


def test_updates_larger_than_a_piece_are_applied_and_a_trainer_that_leaves_has_sent_all() -> None:
    numel, central = 3 * PIECE // 8 + 5, Vector(3 * PIECE // 8 + 5)
    server = started(central, dense())
    trainer = joined(server, dense(), Vector(numel), in_flight=20)
    for _ in range(12):
        trainer.model.give(torch.ones(numel, dtype=torch.float64))  # type: ignore[operator]
        trainer.step()
    trainer.close()
    assert server.wait(20)
    assert torch.equal(central.large, torch.full_like(central.large, -12))


def test_more_servers_than_parameters_are_refused() -> None:
    with pytest.raises(ValueError, match="3 servers for 2 parameters"):
        started(servers=3, index=0)
    with pytest.raises(ValueError, match="this is server 2 of 2"):
        started(servers=2, index=2)
    with pytest.raises(ValueError, match="address is 'here'; expected host:port"):
        serve(Vector(), dense(), make_optimizer=torch.optim.SGD, address="here")


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

"""What the tests of the server share: a model of one vector, and a trainer that sends whatever it is told to."""

import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, BinaryIO, TypeVar

import pytest
import torch
from torch import Tensor, nn

from thinwire import codecs, exchanges, memories, recipes
from thinwire.reducer import Compressed, Reducer
from thinwire.server import Server, Trainer, connect, serve
from thinwire.trainer.contents import Uplink
from thinwire.wire.frames import Bytes, Frame, GoneError, Kind, Talk
from thinwire.wire.layout import layouts
from thinwire.wire.rendezvous import said, ticket
from thinwire.wire.sections import pack
from thinwire.wire.sockets import Bell, Link, open_sockets

NUMEL = 200


class Vector(nn.Module):
    """Two parameters of zeros; their gradients are set by hand."""

    def __init__(self, numel: int = NUMEL, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.large = nn.Parameter(torch.zeros(numel, dtype=dtype))
        self.small = nn.Parameter(torch.zeros(3, dtype=dtype))

    def give(self, gradient: Tensor) -> None:
        """Set the gradients: `large` gets this one, `small` its first three elements."""
        self.large.grad, self.small.grad = gradient.clone(), gradient[:3].clone()


def swapped() -> Vector:
    """Return one whose parameters come in the other order."""
    model = Vector()
    large = model.large
    del model.large
    model.large = large
    return model


class Table(nn.Module):
    """A sparse embedding and a linear layer."""

    def __init__(self, seed: int = 0, rows: int = 50) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.rows = nn.Embedding(rows, 4, sparse=True)
            self.out = nn.Linear(4, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.rows(ids))


def thresholded(density: float = 0.05) -> Reducer:
    """Return Top-k with error feedback for `large`, and `small` uncompressed."""
    return recipes.topk(density=density, minimum_size=10)


def summing(parameters: Any) -> torch.optim.Optimizer:
    """Return SGD that subtracts each gradient as it is, so that a parameter is minus the sum of what was applied."""
    return torch.optim.SGD(parameters, lr=1.0)


class Busy(torch.optim.SGD):
    """A step that takes until `done`."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=1.0)
        self.begun, self.done = threading.Event(), threading.Event()

    def step(self, closure: Any = None) -> Any:
        self.begun.set()
        assert self.done.wait(60)
        return super().step(closure)


def gradients(count: int, seed: int = 0) -> list[Tensor]:
    """Return heavy-tailed float64 gradients."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(NUMEL, generator=generator, dtype=torch.float64) ** 3 for _ in range(count)]


def waiting(recipe: Reducer) -> Tensor:
    """Return what waits of `large`."""
    (memory,) = (memory for memory in recipe.memories() if memory.stateful)
    held = memory.state().get("large", {})
    return held.get("residual", torch.zeros(NUMEL, dtype=torch.float64))


def started(model: nn.Module | None = None, recipe: Reducer | None = None, **options: Any) -> Server:
    """Return a server of a `Vector` that sums."""
    options = {"make_optimizer": summing, "timeout": 20.0, **options}
    return _kept(serve(model or Vector(), recipe or thresholded(), **options))


def joined(server: Server, recipe: Reducer | None = None, model: nn.Module | None = None, **options: Any) -> Trainer:
    """Return a trainer of that server."""
    options = {"address": server.address, "timeout": 20.0, **options}
    return _kept(connect(model or Vector(), recipe or thresholded(), **options))


def crash(server: Server) -> None:
    """End a server as a kill would: it saves nothing more. Until then it does not say that it has."""
    server._hub.saving.save = lambda: None  # type: ignore[method-assign]
    server.close()


def cut(server: Server) -> None:
    """Break all connections to a server of this process, as a network does."""
    connections(server.address, lambda each: each.shutdown(socket.SHUT_RDWR))


def connections(address: str, call: Callable[[socket.socket], object] = bool, *, listening: bool = False) -> int:
    """Call something for each socket of this process that is connected at that address, and return how many are."""
    found, port = 0, int(address.rpartition(":")[2])
    for _, each in open_sockets():
        with suppress(OSError):
            listens = each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if each.getsockname()[1] == port and (listening or not listens):
                found += 1
                call(each)
    return found


def soon(so: Callable[[], bool], seconds: float = 10.0) -> bool:
    """Wait until it is so, at most so long. Return whether it is."""
    deadline = time.monotonic() + seconds
    while not so() and time.monotonic() < deadline:
        time.sleep(0.05)
    return so()


class Proxy:
    """Passes bytes between trainers and a server, and `spoils` those that pass, if it is told how.

    `drops`: whether to leave out a whole message, given the way it goes (up: to the server) and its length.
    """

    def __init__(
        self,
        address: str,
        spoil: Callable[[bytes], bytes] = bytes,
        drops: Callable[[bool, int], bool] | None = None,
    ) -> None:
        host, port = address.split(":")
        self._server, self._spoil, self.passed, self.accepted = (host, int(port)), spoil, 0, 0
        self._drops = drops
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()
        _kept(self)

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                one, other = self._listener.accept()[0], socket.create_connection(self._server)
                self.accepted += 1
                for ends in ((one, other, True), (other, one, False)):
                    threading.Thread(target=self._pass, args=ends, daemon=True).start()

    def _pass(self, here: socket.socket, there: socket.socket, up: bool) -> None:
        with suppress(OSError), here:
            for data in self._kept(here.makefile("rb"), up) if self._drops else iter(lambda: here.recv(1 << 16), b""):
                self.passed += 1
                there.sendall(self._spoil(data))
        with suppress(OSError):
            there.shutdown(socket.SHUT_RDWR)

    def _kept(self, here: BinaryIO, up: bool) -> Iterator[bytes]:
        """Yield ZMTP's greeting, which the sides say in turns, then commands and what is not dropped, each whole."""
        for _ in range(64):
            yield here.read(1)
        while flags := here.read(1):
            size = here.read(8 if flags[0] & 2 else 1)
            body = here.read(int.from_bytes(size, "big"))
            assert self._drops
            if flags[0] & 4 or not self._drops(up, len(body)):
                yield flags + size + body

    def close(self) -> None:
        """Accept no more."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


T = TypeVar("T", Server, Trainer, "Raw", "Proxy")


def _kept(opened: T) -> T:
    """Note what is open."""
    _opened.append(opened)
    return opened


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    """Close what a test has left open, trainers first. Modules that import this have it done after every test."""
    yield
    for each in reversed(_opened):
        each.close()
    _opened.clear()


_opened: "list[Server | Trainer | Raw | Proxy]" = []


def warnings(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """Return what was logged as a warning or worse during a test, and while its fixtures ended."""
    records = [*caplog.get_records("call"), *caplog.get_records("teardown")]
    return [each for each in records if each.levelno >= logging.WARNING]


def dense() -> Reducer:
    """Return the recipe that sends everything."""
    return recipes.dense()


def kept(density: float = 0.05) -> Reducer:
    """Return a kept threshold with error feedback, as in DCT, for every parameter."""
    memory = memories.Noted(memory=memories.ErrorFeedback())
    return Compressed(memory=memory, codec=codecs.KeptThreshold(density=density), exchange=exchanges.AllGather())


class Raw:
    """A trainer that sends the frames it is told to, over one connection; it may join again with the same number."""

    def __init__(
        self,
        address: str,
        who: str = "0" * 32,
        recipe: Reducer | None = None,
        model: nn.Module | None = None,
        *,
        fetch_rows: bool = False,
        join: bool = True,
    ) -> None:
        self.recipe, self.who = recipe or thresholded(), who
        (layout,) = layouts(model or Vector(), self.recipe, None, servers=1, fetch_rows=fetch_rows)
        self._uplink = Uplink(layout, who)
        key = ticket(said(None)[0], address, 0, seconds=20.0)
        limits = dict.fromkeys(Kind, 1 << 24)
        self.link = Link(address, key, Bell(), Talk(limits), timeout=20.0)
        _kept(self)
        self.send = self.link.send
        self.said = json.dumps({"trainer": who, "agreed": layout.agreed, "pace": [None, 0, 0]}).encode()
        if join:
            self.send(Kind.JOIN, self.said)
            self.welcome = self.receive()

    def send_raw(self, message: Bytes) -> None:
        """Send one message."""
        self.link.talk.outbox.append(message)
        self.link.flush()

    def receive(self, *, pings: bool = False) -> Frame:
        """Return the next frame, as a rule the next that is no ping. Raises GoneError for END."""
        while (frame := self.link.receive()) is None or (frame.kind is Kind.PING and not pings):
            pass
        if frame.kind is Kind.END:
            raise GoneError(bytes(frame.body).decode())
        return frame

    def body(self, number: int, gradient: Tensor) -> list[Any]:
        """Return the body of an update."""
        sections = self._uplink.encode(number, {"large": gradient, "small": gradient[:3]}, drain=False)
        for memory in self.recipe.memories():
            memory.commit()
        return pack(sections)

    def update(self, number: int, body: Sequence[Any], *, version: int = 0, flags: int = 0) -> Frame:
        """Send an update and return the answer."""
        self.send(Kind.UPDATE, *body, number=number, version=version, flags=flags)
        return self.receive()

    def close(self) -> None:
        """Close the connection."""
        self.link.close()

"""ZeroMQ sockets whose every message is authenticated and encrypted, by CURVE.

libzmq answers heartbeats, encrypts and keeps its queues in a thread of its own, so a side that computes is never
silent. It asks who may join before anything of theirs comes in (RFC 27). A socket is used by one thread.
"""

import errno
import logging
import math
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, final
from weakref import finalize

from thinwire.wire import frames
from thinwire.wire.frames import Bytes, Frame, GoneError, Kind, Talk

try:
    import zmq
    from zmq.utils import monitor, z85
except ImportError:  # of the extra `server`
    zmq = None  # type: ignore[assignment]

logger = logging.getLogger("thinwire")
TICK = 0.2
"""Seconds in which either side notices what nothing rings for."""
_QUEUED = 256  # messages to each peer that libzmq holds; then who sends waits
_HANDSHAKE = 5.0  # seconds that a connection has to prove who it is
_DIGITS = 128  # of a key in a file
SECRET = "secret:"
"""What a server's key begins with, where it is written: a ticket has as many digits."""
_REMEMBERED = 1024  # addresses of strangers
_PAUSE = 0.1  # seconds in which libzmq fails to accept no more than some thousand times
_LINGER = 1.0  # seconds for the last words
_ends = set[tuple[str, int]]()
"""Where this process listens, by port alone, or is connected to."""


def check_installed() -> None:
    """Raise ImportError without pyzmq."""
    if zmq is None:
        raise ImportError("a parameter server needs pyzmq: pip install 'thinwire[server]'")


def _public(secret: bytes) -> bytes:
    return z85.decode(zmq.curve_public(z85.encode(secret)))


@final
@dataclass(frozen=True, repr=False)
class Key:
    """A server's key, or a ticket: the server's secret key, or its public one, and the trainers' secret key.

    By the one pair trainers know the server, and by the other it knows them. With a ticket one can join, and not be
    taken for the server.
    """

    server: bytes
    trainers: bytes

    @classmethod
    def fresh(cls) -> Self:
        """Return a new server's."""
        return cls(*(z85.decode(zmq.curve_keypair()[1]) for _ in range(2)))

    @classmethod
    def read(cls, text: str, where: str) -> Self:
        """Return the ticket that is written there. Raises ValueError, which does not show it."""
        if text.startswith(SECRET):
            raise ValueError(
                f"{where} is the server's own key, which no trainer needs; expected its ticket: the file beside it "
                "whose name ends with .ticket, or server.ticket"
            )
        found = b""
        with suppress(ValueError):
            found = bytes.fromhex(text)
        if 2 * len(found) != _DIGITS:
            raise ValueError(f"{where} holds no key or ticket of a server; expected {_DIGITS} hexadecimal digits")
        return cls(found[: _DIGITS // 4], found[_DIGITS // 4 :])

    @property
    def text(self) -> str:
        """It as it is written."""
        return (self.server + self.trainers).hex()

    @property
    def ticket(self) -> Self:
        """What trainers need of a server's key."""
        return type(self)(_public(self.server), self.trainers)


@final
class Bell:
    """Any thread rings it, and one that polls wakes up."""

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        finalize(self, os.close, self.descriptor).atexit = False  # when nobody can ring it any more

    def ring(self) -> None:
        """Wake who polls."""
        os.eventfd_write(self.descriptor, 1)

    def hush(self) -> bool:
        """Stop ringing. Return whether it rang."""
        with suppress(BlockingIOError):
            return bool(os.eventfd_read(self.descriptor))
        return False


def _milliseconds(seconds: float) -> int:
    return int(min(max(1.0, 1000 * seconds), 1e9))


def _socket(context: "zmq.Context[Any]", kind: int, host: str, timeout: float, **options: Any) -> "zmq.Socket[bytes]":
    """Return a socket with these options, which are named as libzmq does."""
    made, patience = context.socket(kind), _milliseconds(timeout)
    options |= {"heartbeat_ivl": _milliseconds(timeout / 4), "heartbeat_timeout": patience, "connect_timeout": patience}
    options |= {"handshake_ivl": _milliseconds(_HANDSHAKE), "ipv6": ":" in host, "sndhwm": _QUEUED}
    options["maxmsgsize"] = frames.HEADER.size + frames.PIECE + frames.NUMBER + frames.AROUND
    for name, value in options.items():
        setattr(made, name, value)
    return made


def split(address: str) -> tuple[str, int]:
    """Return host and port. Raises ValueError for anything else."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"address is {address!r}; expected host:port, such as 10.0.0.1:29400 or [::1]:29400")
    return host.strip("[]"), int(port)


def joint(host: str, port: int) -> str:
    """Return host:port, as `split` takes it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_here(host: str) -> bool:
    """Return whether this is an address of this machine."""
    with suppress(OSError), socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return True
    return False


def resolved(address: str) -> tuple[str, int]:
    """Return a number and a port. Raises GoneError for a host that is not known, and ValueError for no host:port."""
    place = split(address)
    try:
        found = socket.getaddrinfo(*place, type=socket.SOCK_STREAM)
    except OSError as error:
        raise GoneError(f"{address} cannot be found ({error})", "check the address, and this host's DNS") from error
    host, port = min(found, key=lambda each: each[0] != socket.AF_INET)[4][:2]
    return str(host), int(port)


@final
class Listener:
    """A server's socket: messages from and to any number of peers, each of which knows the server's key.

    `longest`: messages of the longest update. Who sends more than an honest trainer has unanswered has to wait.
    """

    def __init__(self, address: str, key: Key, *, timeout: float, longest: int) -> None:
        (host, port), self._ending = resolved(address), deque[tuple[float, int, Callable[[], bool]]]()
        self._end, self._met, self._context = ("", 0), set[tuple[str, bool]](), zmq.Context[Any]()
        # libzmq counts up to half of it late. With less, heartbeats would wait behind what a busy server has not read
        most = _QUEUED + 2 * frames.WINDOW * longest
        options = {"curve_server": 1, "curve_secretkey": key.server, "zap_domain": b"thinwire", "router_mandatory": 1}
        self._socket = _socket(self._context, zmq.ROUTER, host, timeout, rcvhwm=most, backlog=1024, **options)
        door, failures = self._context.socket(zmq.REP), self._socket.get_monitor_socket(zmq.EVENT_ACCEPT_FAILED)
        door.bind("inproc://zeromq.zap.01")
        self._doorkeeper = threading.Thread(target=self._keep_door, args=(door, failures, key.trainers), daemon=True)
        self._doorkeeper.start()
        try:
            self._socket.bind(f"tcp://{joint(host, port)}")
        except zmq.ZMQError as error:
            self.close()
            raise OSError(error.errno, f"{error.strerror}: {address}") from error
        port = split(self._socket.getsockopt_string(zmq.LAST_ENDPOINT))[1]
        self.address, self._end = joint(host, port), ("", port)
        _ends.add(self._end)
        self._poller, self.bell = zmq.Poller(), Bell()
        for each in (self._socket, self.bell.descriptor):
            self._poller.register(each, zmq.POLLIN)

    def wait(self, seconds: float) -> None:
        """Wait until something has come or the bell rings, at most so long."""
        self._poller.poll(int(1000 * seconds))
        self.bell.hush()
        self._hang_up(time.monotonic() - _LINGER)

    def receive(self) -> tuple[bytes, memoryview, str, int] | None:
        """Return who sent a message, it, from where, and its connection's descriptor; None if none has come.

        libzmq calls SRCFD deprecated, but knows nothing else by which a ROUTER's owner may close one connection:
        `zmq_disconnect_peer` is for drafts that pyzmq's wheels leave out.
        """
        try:
            peer, message, *_ = self._socket.recv_multipart(zmq.DONTWAIT, copy=False)
        except (zmq.Again, ValueError):  # ValueError: an empty one
            return None
        return peer.bytes, message.buffer, str(message.get("Peer-Address")), int(message.get(zmq.SRCFD))

    def send(self, peer: bytes, message: bytes) -> bool:
        """Send a message, and return whether there was room for it. Raises GoneError if that peer is gone."""
        try:
            self._socket.send_multipart([peer, message], zmq.DONTWAIT)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            raise GoneError("the connection was closed") from error
        return True

    def refused(self, host: str, why: Exception) -> None:
        """Log why a connection ends, once for each host: PermissionError for a stranger, and once for any other."""
        if (key := (host, isinstance(why, PermissionError))) not in self._met and len(self._met) < _REMEMBERED:
            self._met.add(key)
            logger.warning("closed a connection from %s: %s. Further ones from there are not logged", host, why)

    def end(self, descriptor: int, reached: Callable[[], bool]) -> None:
        """Close a connection, when the last words are said; libzmq leaves that to the other side.

        `reached`: whether the peer is connected still, so that the descriptor was not another's when it was copied.
        """
        with suppress(OSError):  # it is closed. A copy, as libzmq may close it first, and its number be another's
            self._ending.append((time.monotonic(), os.dup(descriptor), reached))

    def _hang_up(self, until: float) -> None:
        while self._ending and self._ending[0][0] < until:
            _, copy, reached = self._ending.popleft()
            if reached():
                with suppress(OSError), socket.fromfd(copy, socket.AF_INET, socket.SOCK_STREAM) as connection:
                    connection.shutdown(socket.SHUT_RDWR)
            os.close(copy)

    def close(self) -> None:
        """Close all connections, when the last words are said."""
        self._socket.close(int(1000 * _LINGER))
        self._context.term()
        self._hang_up(math.inf)
        self._doorkeeper.join()
        _ends.discard(self._end)

    def _keep_door(self, door: "zmq.Socket[bytes]", failures: "zmq.Socket[bytes]", theirs: bytes) -> None:
        """Let in who has the trainers' key, until the context ends.

        Without descriptors libzmq tries to accept again at once; but it waits until somebody hears of its failures.
        """
        allowed, poller = _public(theirs), zmq.Poller()
        poller.register(door, zmq.POLLIN)
        poller.register(failures, zmq.POLLIN)
        with suppress(zmq.ContextTerminated):
            while True:
                if door not in dict(poller.poll()):
                    time.sleep(_PAUSE)
                    with suppress(zmq.Again):
                        for _ in range(failures.rcvhwm):
                            failures.recv_multipart(zmq.DONTWAIT)
                    continue
                version, request, _, peer, _, mechanism, *key = door.recv_multipart()
                if not (known := mechanism == b"CURVE" and key == [allowed]):
                    self.refused(peer.decode(), PermissionError("it does not have the key"))
                door.send_multipart([version, request, b"200" if known else b"400", b"", b"", b""])
        door.close(0)
        failures.close(0)


@final
class Link:
    """A trainer's connection to a server, whose frames `talk` has. One thread at a time uses it, until it is `over`."""

    def __init__(
        self, address: str, ticket: Key, bell: Bell, talk: Talk, *, timeout: float, over: Callable[[], bool] = bool
    ) -> None:
        self._end, self.talk, self._bell, self._over = resolved(address), talk, bell, over
        self._gone: GoneError | None = None
        self._spoke, self._pause = time.monotonic(), timeout / 3
        mine, self._context = ticket.trainers, zmq.Context[Any]()
        keys = {"curve_serverkey": ticket.server, "curve_secretkey": mine, "curve_publickey": _public(mine)}
        options = keys | {"linger": 0, "rcvhwm": 0, "reconnect_ivl": -1}  # its owner joins again
        self._socket = _socket(self._context, zmq.DEALER, self._end[0], timeout, **options)
        events = zmq.EVENT_ALL & ~zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL  # to tell of that, libzmq loses errno and aborts
        self._monitor = self._socket.get_monitor_socket(events)
        self._poller = zmq.Poller()
        for each in (self._socket, self._monitor, bell.descriptor):
            self._poller.register(each, zmq.POLLIN)
        _ends.add(self._end)
        self._socket.connect(f"tcp://{joint(*self._end)}")

    def send(self, kind: Kind, *body: Bytes, **head: Any) -> None:
        """Send a frame whose body is these parts, with what `head` says. Raises GoneError."""
        self.talk.say(kind, *body, **head)
        self.flush()

    def flush(self) -> None:
        """Send all that has yet to leave, when there is room for it. Raises GoneError."""
        while self.talk.flush(self._sent) and not self._over():
            self._look()
            if self._gone is not None:
                raise self._gone
            self._socket.poll(int(1000 * TICK), zmq.POLLOUT)
        self._spoke = time.monotonic()

    def _sent(self, message: bytes) -> bool:
        with suppress(zmq.Again):
            self._socket.send(message, zmq.DONTWAIT)
            return True
        return False

    def receive(self) -> Frame | None:
        """Wait for a frame, and ping meanwhile; None if the bell rang. Raises GoneError or FrameError."""
        while True:
            try:
                message = self._socket.recv(zmq.DONTWAIT, copy=False)
            except zmq.Again:
                if self._gone is not None:  # and all has been read
                    raise self._gone from None
                if self._bell.hush():
                    return None
                if time.monotonic() - self._spoke > self._pause and self._socket.poll(0, zmq.POLLOUT):
                    self.send(Kind.PING)
                self._poller.poll(_milliseconds(self._pause))
                self._look()
                continue
            if (frame := self.talk.take(message.buffer)) is not None:
                return frame

    def _look(self) -> None:
        while self._gone is None and self._monitor.poll(0):
            seen = monitor.recv_monitor_message(self._monitor)
            event = zmq.Event(seen["event"]).name or ""
            if event == "HANDSHAKE_FAILED_NO_DETAIL" and seen["value"] == errno.EAGAIN:  # it did not hang up
                event = "SILENT"
            self._gone = GoneError(*_WORDS[event]) if event in _WORDS else None

    def close(self) -> None:
        """Close the connection; what has not left is lost."""
        if self._socket.closed:
            return
        _ends.discard(self._end)
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close()
        self._context.term()


_FIX = (
    "the ticket is of another server, or of an earlier start: pass this one's server.ticket as ticket=; with "
    "checkpoint= or key=, a server keeps its ticket when it starts again"
)
_WORDS = {
    "CLOSED": ("nobody listens there",),
    "DISCONNECTED": ("the connection was closed",),
    "SILENT": (
        f"within {_HANDSHAKE:g} s it has not answered as a thinwire server does",
        "if it is stopped, or its host too busy, see to that, or pass reconnect=, in seconds, to wait for it; if "
        f"something else listens there, check the address; or {_FIX}",
    ),
    # anybody on the way can say so
    "HANDSHAKE_FAILED_AUTH": ("it does not know this trainer's ticket", _FIX),
    "HANDSHAKE_FAILED_NO_DETAIL": (
        "the connection broke before the keys were checked",
        "if the server has ended or was started again, see its log, or pass reconnect=, in seconds, to wait for it; if "
        f"something else listens there, check the address; or it has another key: {_FIX}",
    ),
}


def open_sockets() -> Iterator[tuple[int, socket.socket]]:
    """Yield the descriptors of this process's sockets that lead to a network, each with a copy of it."""
    for file in list(Path("/proc/self/fd").iterdir()):
        with suppress(OSError):  # it was that of the folder
            if str(file.readlink()).startswith("socket:"):
                with socket.fromfd(int(file.name), socket.AF_INET, socket.SOCK_STREAM) as copy:
                    if copy.getsockopt(socket.SOL_SOCKET, socket.SO_DOMAIN) in (socket.AF_INET, socket.AF_INET6):
                        yield int(file.name), copy


def _close_copies() -> None:
    """In a forked child, close the copies of this process's connections, which would outlive it and keep the port."""
    for each, copy in open_sockets() if _ends else ():
        ends = {("", copy.getsockname()[1])}
        with suppress(OSError):
            ends.add(copy.getpeername()[:2])
        if ends & _ends:
            os.close(each)
    _ends.clear()


os.register_at_fork(after_in_child=_close_copies)

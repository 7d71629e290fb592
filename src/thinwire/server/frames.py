"""Frames on a TCP connection: a header of fixed size, then a body whose length is checked before room is made for it.

A frame is 32 bytes and its body, little-endian: `TWPS`, protocol version (u16), kind (u8), flags (u8), number (u64),
version of the parameters (u64), length of the body (u64). A side that has nothing to say sends a ping now and then, so
silence means that the other side is gone. When a trainer joins, each side states its time-out.
"""

import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from enum import IntEnum, IntFlag
from typing import NamedTuple, final
from weakref import WeakSet

PROTOCOL = 4
MAGIC = b"TWPS"
HEADER = struct.Struct("<4sHBBQQQ")
_TICKS = 4  # pings within the time after which silence means that the other side is gone
SHORTEST = 0.8
"""Seconds: a shorter time-out of the other side is ignored, or it could make this one do nothing but ping."""
_ours = WeakSet[socket.socket]()


class Kind(IntEnum):
    """What a frame is. A ping from the server has the number of the trainer's latest update that is on disk.

    A FETCH gets ROWS of the same number; a watcher's WATCH, in place of JOIN, gets STATUS. The number of a JOIN, a
    WATCH and a WELCOME is the sender's time-out in milliseconds.
    """

    PING = 0
    JOIN = 1
    WELCOME = 2
    REFUSED = 3
    UPDATE = 4
    PARAMETERS = 5
    BYE = 6
    WATCH = 7
    STATUS = 8
    FETCH = 9
    ROWS = 10


class Flag(IntFlag):
    """What else there is to know about a frame."""

    DRAINED = 1
    """Of an update: it is not compressed, and includes the residual."""
    SAVE = 2
    """Of an update or a ping: the trainer's log is half full, so the server should save soon."""
    DROPPED = 4
    """Of an answer: the update was not finite and has not been applied."""
    BRIEF = 8
    """Of an update: others follow at once, so the answer may leave parameters out. Of an answer: it has none."""


NONE = Flag(0)


class FrameError(ValueError):
    """These bytes are no frame that may come now. The connection is closed; nothing else happens."""


class GoneError(ConnectionError):
    """The other side is gone."""


class Frame(NamedTuple):
    """A frame. `body` is valid until the next one is received."""

    kind: Kind
    flags: Flag
    number: int
    version: int
    body: memoryview


def parse(header: bytes | bytearray, limits: Mapping[Kind, int]) -> tuple[Kind, Flag, int, int, int]:
    """Return kind, flags, number, version and length, or raise FrameError; `limits`: of bodies that may come."""
    magic, protocol, kind, flags, number, version, length = HEADER.unpack(header)
    if magic != MAGIC or protocol != PROTOCOL:
        raise FrameError(f"got {bytes(magic)!r}, version {protocol}; expected {MAGIC!r}, version {PROTOCOL}")
    if kind not in limits or flags > sum(Flag):
        raise FrameError(f"got kind {kind} with flags {flags}; expected one of {[int(each) for each in limits]}")
    if length > limits[Kind(kind)]:
        raise FrameError(f"a {Kind(kind).name} of {length} bytes; at most {limits[Kind(kind)]} may come")
    return Kind(kind), Flag(flags), number, version, length


def leave_to_this_process(connection: socket.socket) -> socket.socket:
    """Have forked children close their copy, which would keep the port or the connection when this process is gone."""
    _ours.add(connection)
    return connection


def _close_copies() -> None:
    for connection in list(_ours):
        connection.close()


os.register_at_fork(after_in_child=_close_copies)


@final
class Wire:
    """Sends and receives frames over a connected socket. One thread receives; any may send.

    timeout: seconds of silence after which the other side is taken for gone. limits: for `parse`; the owner changes
    them as the conversation goes on. note: what a ping says.
    """

    def __init__(self, connection: socket.socket, *, timeout: float, limits: Mapping[Kind, int]) -> None:
        self._socket, self._timeout, self.limits = leave_to_this_process(connection), timeout, limits
        self._sending, self._room = threading.Lock(), bytearray(4096)
        self.tick = timeout / _TICKS
        """Seconds between pings."""
        self._heard = self._said = self._begun = time.monotonic()
        self.note: Callable[[], int] = int
        self.sent = self.received = 0
        connection.settimeout(self.tick)
        if connection.family in (socket.AF_INET, socket.AF_INET6):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * timeout))  # of a lost host

    @property
    def milliseconds(self) -> int:
        """The time-out of this side, as the other is told."""
        return int(1000 * self._timeout)

    def heed(self, milliseconds: int) -> None:
        """Ping as often as the other side's time-out wants it."""
        self.tick = min(self._timeout, max(milliseconds / 1000, SHORTEST)) / _TICKS

    @property
    def peer(self) -> str:
        """The other side's address."""
        try:
            return str(self._socket.getpeername()[0])
        except (OSError, IndexError):
            return "an unknown address"

    def send(
        self, kind: Kind, *body: "bytes | memoryview", number: int = 0, version: int = 0, flags: Flag = NONE
    ) -> None:
        """Send a frame whose body is these parts, and wait until it is on its way. Raises GoneError."""
        length = sum(map(len, body))
        header = HEADER.pack(MAGIC, PROTOCOL, kind, flags, number, version, length)
        with self._sending:
            self._send_all((header, *body))

    def send_raw(self, data: bytes) -> None:
        """Send bytes that are not a frame: the handshake. Raises GoneError."""
        with self._sending:
            self._send_all((data,))

    def ping(self) -> None:
        """Say that this side is alive, unless it is sending something anyway. Raises GoneError."""
        if self._sending.acquire(blocking=False):
            try:
                self._send_all((HEADER.pack(MAGIC, PROTOCOL, Kind.PING, 0, self.note(), 0, 0),))
            finally:
                self._sending.release()

    def ping_if_due(self) -> None:
        """Ping if this side has said nothing for a while. Raises GoneError."""
        if time.monotonic() - self._said > self.tick:
            self.ping()

    def receive(self) -> Frame:
        """Wait for a frame. Raises FrameError for what is none, and GoneError if the other side is gone."""
        header = bytearray(HEADER.size)
        self.receive_raw(memoryview(header))
        kind, flags, number, version, length = parse(header, self.limits)
        if length > len(self._room):
            self._room = bytearray(length)
        body = memoryview(self._room)[:length]
        self.receive_raw(body)
        return Frame(kind, flags, number, version, body)

    def receive_raw(self, into: memoryview, *, deadline: float | None = None) -> None:
        """Fill `into`, by a deadline (`time.monotonic`) if any; ping only without one: the other side is known then."""
        while into:
            self._wait_at_most(deadline)
            try:
                count = self._socket.recv_into(into)
            except TimeoutError:
                if deadline is None:
                    self._check_heard()
                    self.ping()
                continue
            except OSError as error:
                raise GoneError(str(error)) from error
            if not count:
                raise GoneError("the connection was closed")
            self._heard, into = time.monotonic(), into[count:]
            self.received += count
            if deadline is None:
                self.ping_if_due()

    def _wait_at_most(self, deadline: float | None) -> None:
        """Set how long the next `recv` may take. Raises GoneError after the deadline."""
        rest = self.tick if deadline is None else deadline - time.monotonic()
        if rest <= 0:
            raise GoneError("its handshake did not come in time")
        with suppress(OSError):  # it is closed: `recv` says so
            self._socket.settimeout(min(rest, self.tick))

    def gone(self) -> bool:
        """Whether the other side has closed the connection. Reads nothing, and does not wait."""
        try:
            return self._peek() == b""
        except (OSError, ValueError):  # ValueError: it was closed on this side
            return True

    def close(self) -> None:
        """Close the connection; threads that send or receive get GoneError."""
        with suppress(OSError):  # it is closed already
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _check_heard(self) -> None:
        """Raise GoneError after a long silence; not if this process slept through what has come meanwhile."""
        if time.monotonic() - self._heard > self._timeout and not self._has_come():
            raise GoneError(f"nothing was heard for {self._timeout:g} s")

    def _has_come(self) -> bool:
        try:
            return self._peek() is not None
        except OSError as error:
            raise GoneError(str(error)) from error

    def _peek(self) -> bytes | None:
        """Return the next byte without taking it, nothing at the end, None if there is none yet. Raises OSError."""
        ready = select.poll()
        ready.register(self._socket, select.POLLIN)
        return self._socket.recv(1, socket.MSG_PEEK) if ready.poll(0) else None

    def _send_all(self, parts: "tuple[bytes | memoryview, ...]") -> None:
        self._begun = time.monotonic()
        for i, part in enumerate(parts):
            rest, more = memoryview(part).cast("B"), socket.MSG_MORE if i + 1 < len(parts) else 0
            while rest:
                rest = rest[self._send_some(rest, more) :]
                if len(part) > HEADER.size:  # whoever takes more than fits in a buffer is there
                    self._heard = time.monotonic()

    def _send_some(self, rest: memoryview, more: int) -> int:
        try:
            count = self._socket.send(rest, more)
        except TimeoutError:
            if time.monotonic() - max(self._heard, self._begun) > self._timeout:
                raise GoneError(f"nothing could be sent for {self._timeout:g} s") from None
            return 0
        except OSError as error:
            raise GoneError(str(error)) from error
        self.sent += count
        self._said = time.monotonic()
        return count

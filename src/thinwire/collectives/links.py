"""Connections between workers that find each other by themselves, outside any process group.

A link is several connections. Whoever dials begins each with the same 16 random bytes and its number (u8). Frames take
turns to begin on them: `TWOS`, the length of the words (u32) and of the body (u64), little-endian; then the words, as
JSON, and the body. Of a long body each connection carries an equal part, in order from the one on which the frame
begins. If one connection ends, so does the link. A side with nothing to say says so every second. One that is silent
for longer than `SILENCE` is taken for gone, and told so, as is one whose link a newer one replaces: a link that ends
without a word would look as if this side were gone.
With a certificate all of it is in TLS.
"""

import json
import logging
import secrets
import select
import socket
import ssl
import struct
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from itertools import cycle
from operator import itemgetter
from queue import Empty, SimpleQueue
from typing import Any, Protocol, final

from thinwire.collectives.certificates import Certificate

_log = logging.getLogger("thinwire")

SILENCE = 4.0
"""Seconds after which a worker that says nothing is gone."""
CONNECTIONS = 4
"""That a link has: on a long way each carries no more than its window in a round trip."""
_TICK = 1.0
_HEAD = struct.Struct("<4sIQ")
_MAGIC, _MOST_WORDS = b"TWOS", 1 << 20
_NUMBERED = struct.Struct("<16sB")
_PIECE = 1 << 16  # bytes
_REMEMBERED = 1024  # addresses of strangers
_ANSWERED = 64  # connections at once that have yet to show what they are

Words = Mapping[str, Any]
_UNHEARD: Words = {"kind": "unheard"}
_Parts = Sequence[tuple[socket.socket, memoryview]]


class Owner(Protocol):
    """Whose links these are. `limit`: the most bytes that a body may have."""

    limit: int

    def status(self) -> Words:
        """Return what a worker with nothing to say says."""

    def take(self, link: "Link", words: Words, body: bytes) -> None:
        """Take a frame. Raises ValueError for one that must not come."""

    def lost(self, link: "Link", *, silent: bool) -> None:
        """A link has ended; `silent`: one side heard nothing, so the other may yet be there."""


@final
class Link:
    """Connections to another worker, whose id is `peer` once it has said so. `arriving`: whether a body is."""

    def __init__(self, connections: Sequence[socket.socket], owner: Owner) -> None:
        self.peer, self.arriving, self._silent, self._closing = "", False, False, False
        self._connections, self._owner = connections, owner
        self._queue: SimpleQueue[tuple[bytes, bytes] | None] = SimpleQueue()
        self._turn = threading.Lock()  # TLS is for one thread at a time
        for each in connections:
            each.setblocking(False)
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._listened = threading.Event()
        self._says = threading.Thread(target=self._say, daemon=True, name="thinwire-link")
        self._says.start()

    def send(self, words: Words, body: bytes = b"") -> None:
        """Send a frame, after those before. Does not wait."""
        self._queue.put((json.dumps(words).encode(), body))

    def listen(self) -> None:
        """Take frames until the connection ends. Of a link that is being closed they are read, and dropped."""
        try:
            for turn in self._turns():
                magic, words, body = _HEAD.unpack(self._read(turn[:1], _HEAD.size))
                if magic != _MAGIC or words > _MOST_WORDS or body > self._owner.limit:
                    raise ValueError(f"{magic!r} with {words} and {body} bytes is not a valid frame")
                said, self.arriving = json.loads(self._read(turn[:1], words)), body > 0
                whole, self.arriving = self._read(turn, body), False
                if self._closing:
                    continue
                if said == _UNHEARD:
                    raise TimeoutError("the other side has heard nothing")
                self._owner.take(self, said, whole)
        except TimeoutError:
            self._silent |= not self._closing
        except (OSError, ValueError, KeyError, TypeError):
            pass
        finally:
            self.close(stays=self._silent)
            self._listened.set()
            self._owner.lost(self, silent=self._silent)

    def close(self, *, stays: bool = False) -> None:
        """End the connection once what is queued has been sent, or cannot be. `stays`: this side does, and says so."""
        if stays:
            self.send(_UNHEARD)
        self._closing = True
        self._queue.put(None)

    def wait(self, seconds: float) -> None:
        """Wait until what was queued before `close` has arrived, or cannot, at most so long."""
        self._says.join(max(0.0, seconds))

    def _say(self) -> None:
        try:
            for turn in self._turns():
                if (frame := self._next()) is None:
                    break
                words, body = frame
                self._write(turn[:1], _HEAD.pack(_MAGIC, len(words), len(body)) + words)
                self._write(turn, body)
        except OSError as error:
            self._silent |= isinstance(error, TimeoutError)  # who takes nothing may yet be there
        # What the other side still says is read until it ends, too: otherwise TCP resets the connection, and the last
        # words of both may be lost.
        self._shut(socket.SHUT_WR)
        if not self._silent:
            self._listened.wait(SILENCE)
        self._shut(socket.SHUT_RDWR)
        for each in self._connections:
            each.close()

    def _shut(self, how: int) -> None:
        for each in self._connections:
            with suppress(OSError):
                socket.socket.shutdown(each, how)  # that of TLS would send what follows in the clear

    def _turns(self) -> Iterator[Sequence[socket.socket]]:
        """Yield the connections from that on with which the next frame begins."""
        for first in cycle(range(len(self._connections))):
            yield [*self._connections[first:], *self._connections[:first]]

    def _next(self) -> tuple[bytes, bytes] | None:
        try:
            return self._queue.get(timeout=_TICK)
        except Empty:
            return json.dumps(self._owner.status()).encode(), b""

    def _write(self, turn: Sequence[socket.socket], data: bytes) -> None:
        self._move(_parts(turn, memoryview(data)), lambda to, rest: to.send(rest[:_PIECE]), select.POLLOUT)

    def _read(self, turn: Sequence[socket.socket], count: int) -> bytes:
        found = bytearray(count)
        self._move(_parts(turn, memoryview(found)), _received, select.POLLIN)
        return bytes(found)

    def _move(self, parts: _Parts, move: Callable[[socket.socket, memoryview], int], ready: int) -> None:
        """Move all of each part over its connection. Raises TimeoutError."""
        while parts := [part for part in parts if part[1]]:
            moved = [self._moved(move, *part) for part in parts]
            parts = [(over, rest[count:]) for (over, rest), count in zip(parts, moved, strict=True)]
            if not any(moved):
                poll = select.poll()
                for over, _ in parts:
                    poll.register(over, ready)
                if not poll.poll(1000 * SILENCE):
                    raise TimeoutError("the other side is silent")

    def _moved(self, move: Callable[[socket.socket, memoryview], int], over: socket.socket, rest: memoryview) -> int:
        with self._turn, suppress(BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return move(over, rest)
        return 0


def _parts(turn: Sequence[socket.socket], data: memoryview) -> _Parts:
    size = max(_PIECE, -(-len(data) // len(turn)))
    return [(over, data[number * size :][:size]) for number, over in enumerate(turn)]


def _received(over: socket.socket, rest: memoryview) -> int:
    if count := over.recv_into(rest):
        return count
    raise ConnectionError("the other side has closed the connection")


def serve(
    owner: Owner, host: str, certificate: Certificate | None = None, opened: ExitStack | None = None
) -> tuple[str, int]:
    """Listen at a free port, in a thread, until `opened` is closed. Return the address."""
    listener, strangers = socket.create_server((host, 0)), set[str]()
    free, changed = threading.Semaphore(_ANSWERED), threading.Condition()
    begun = defaultdict[bytes, list[tuple[int, socket.socket]]](list)

    def gathered(connection: socket.socket, name: bytes, number: int) -> Link | None:
        """Wait for the other connections of a link, and return it; None if this is not the first."""
        with changed:
            found = begun[name]
            found.append((number, connection))
            changed.notify_all()
            if len(found) > 1:
                return None
            whole = changed.wait_for(lambda: len(found) >= CONNECTIONS, CONNECTIONS * SILENCE)
            del begun[name]
        connections = [each for _, each in sorted(found, key=itemgetter(0))]
        if whole:
            return Link(connections, owner)
        for each in connections:
            each.close()
        raise TimeoutError("the other connections of a link have not come")

    def answer(connection: socket.socket, whence: str) -> None:
        try:
            try:
                secured = _secured(connection, certificate, answers=True)
                opening = _NUMBERED.unpack(secured.recv(_NUMBERED.size))
            finally:  # before it waits for others, which need a place, too
                free.release()
            link = gathered(secured, *opening)
        except (OSError, struct.error) as error:
            if whence not in strangers and len(strangers) < _REMEMBERED:
                strangers.add(whence)
                _log.warning("refused a connection from %s: %s. Its further ones are not logged", whence, error)
            return
        if link is not None:
            link.listen()

    def accept() -> None:
        while True:
            try:
                connection, (whence, *_) = listener.accept()
            except OSError:
                if listener.fileno() < 0:
                    return
                time.sleep(_TICK)  # such as for want of file descriptors
                continue
            free.acquire()
            threading.Thread(target=answer, args=(connection, whence), daemon=True, name="thinwire-link").start()

    if opened is not None:
        opened.callback(listener.close)
        opened.callback(listener.shutdown, socket.SHUT_RDWR)  # wakes who accepts
    threading.Thread(target=accept, daemon=True, name="thinwire-links").start()
    found: tuple[str, int] = listener.getsockname()[:2]
    return found


def dial(
    owner: Owner,
    address: tuple[str, int],
    hello: Callable[[], tuple[Words, bytes]],
    wanted: Callable[[], bool | None],
    certificate: Certificate | None = None,
) -> None:
    """Keep a link to an address, in a thread; `wanted` says whether it is now, None to stop; `hello` is said first."""

    def connected() -> Link:
        name = secrets.token_bytes(16)
        with ExitStack() as stack:
            found = list[socket.socket]()
            for number in range(CONNECTIONS):
                connection = _secured(socket.create_connection(address, timeout=SILENCE), certificate, answers=False)
                found.append(stack.enter_context(connection))
                connection.sendall(_NUMBERED.pack(name, number))
            stack.pop_all()
        return Link(found, owner)

    def keep() -> None:
        pause = threading.Event()
        while (now := wanted()) is not None:
            with suppress(OSError):
                if now:
                    link = connected()
                    link.send(*hello())
                    link.listen()
            pause.wait(_TICK / 2)

    threading.Thread(target=keep, daemon=True, name="thinwire-dial").start()


def _secured(connection: socket.socket, certificate: Certificate | None, *, answers: bool) -> socket.socket:
    """Return a connection with whom we trust. Raises OSError for others, and closes it."""
    connection.settimeout(SILENCE)
    if certificate is None:
        return connection
    try:
        return certificate.secured(connection, answers=answers)
    except OSError:
        connection.close()
        raise

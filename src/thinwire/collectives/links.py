"""Connections between workers that find each other by themselves, outside any process group.

A frame is `TWOS`, the length of its words (u32) and of its body (u64), little-endian; then the words, as JSON, and the
body. Who has nothing to say says so every second, and who is silent for longer than `SILENCE` is taken for gone, and
told: a link that ends without a word would look as if this side were gone. With a certificate all of it is in TLS.
"""

import json
import logging
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, Protocol, final

from thinwire.collectives.certificates import Certificate

_log = logging.getLogger("thinwire")

SILENCE = 4.0
"""Seconds after which a worker that says nothing is gone."""
_TICK = 1.0
_HEAD = struct.Struct("<4sIQ")
_MAGIC, _MOST_WORDS = b"TWOS", 1 << 20
_PIECE = 1 << 16  # bytes
_REMEMBERED = 1024  # addresses of strangers
_ANSWERED = 64  # connections at once that have yet to show what they are

Words = Mapping[str, Any]
_UNHEARD: Words = {"kind": "unheard"}


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
    """A connection to another worker, whose id is `peer` once it has said so. `arriving`: whether a body is."""

    def __init__(self, connection: socket.socket, owner: Owner) -> None:
        self.peer, self.arriving = "", False
        self._socket, self._owner = connection, owner
        self._queue: SimpleQueue[tuple[bytes, bytes] | None] = SimpleQueue()
        self._turn = threading.Lock()  # TLS is for one thread at a time
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=self._say, daemon=True, name="thinwire-link").start()

    def send(self, words: Words, body: bytes = b"") -> None:
        """Send a frame, after those before. Does not wait."""
        self._queue.put((json.dumps(words).encode(), body))

    def listen(self) -> None:
        """Take frames until the connection ends."""
        silent = False
        try:
            while True:
                magic, words, body = _HEAD.unpack(self._read(_HEAD.size))
                if magic != _MAGIC or words > _MOST_WORDS or body > self._owner.limit:
                    raise ValueError(f"{magic!r} with {words} and {body} bytes is not a valid frame")
                said, self.arriving = json.loads(self._read(words)), body > 0
                whole, self.arriving = self._read(body), False
                if said == _UNHEARD:
                    raise TimeoutError("the other side has heard nothing")
                self._owner.take(self, said, whole)
        except TimeoutError:
            silent = True
            self.send(_UNHEARD)
        except (OSError, ValueError, KeyError, TypeError):
            pass
        finally:
            self.close()
            self._owner.lost(self, silent=silent)

    def close(self) -> None:
        """End the connection once what is queued has been sent, or cannot be."""
        self._queue.put(None)
        self._shut(socket.SHUT_RD)

    def _say(self) -> None:
        with self._socket:
            with suppress(OSError):
                while (frame := self._next()) is not None:
                    words, body = frame
                    self._write(_HEAD.pack(_MAGIC, len(words), len(body)) + words)
                    self._write(body)
            self._shut(socket.SHUT_RDWR)

    def _shut(self, how: int) -> None:
        with suppress(OSError):
            socket.socket.shutdown(self._socket, how)  # that of TLS would send what follows in the clear

    def _next(self) -> tuple[bytes, bytes] | None:
        try:
            return self._queue.get(timeout=_TICK)
        except Empty:
            return json.dumps(self._owner.status()).encode(), b""

    def _write(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[self._moved(lambda piece: self._socket.send(piece), rest[:_PIECE], select.POLLOUT) :]

    def _read(self, count: int) -> bytes:
        found = bytearray(count)
        rest = memoryview(found)
        while rest:
            got = self._moved(lambda piece: self._socket.recv_into(piece), rest, select.POLLIN)
            if not got:
                raise ConnectionError("the other side has closed the connection")
            rest = rest[got:]
        return bytes(found)

    def _moved(self, move: Callable[[memoryview], int], piece: memoryview, ready: int) -> int:
        """Return how many bytes of a piece have moved, when some can. Raises TimeoutError."""
        poll = select.poll()
        poll.register(self._socket, ready)
        while True:
            with self._turn, suppress(BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return move(piece)
            if not poll.poll(1000 * SILENCE):
                raise TimeoutError("the other side is silent")


def serve(owner: Owner, host: str, certificate: Certificate | None = None) -> tuple[str, int]:
    """Listen at a free port, in a thread. Return the address."""
    listener, strangers = socket.create_server((host, 0)), set[str]()
    free = threading.Semaphore(_ANSWERED)

    def answer(connection: socket.socket, whence: str) -> None:
        try:
            link = Link(_secured(connection, certificate, answers=True), owner)
        except OSError as error:
            if whence not in strangers and len(strangers) < _REMEMBERED:
                strangers.add(whence)
                _log.warning("refused a connection from %s: %s. Its further ones are not logged", whence, error)
            return
        finally:
            free.release()
        link.listen()

    def accept() -> None:
        while True:
            try:
                connection, (whence, *_) = listener.accept()
            except OSError:  # such as for want of file descriptors
                time.sleep(_TICK)
                continue
            free.acquire()
            threading.Thread(target=answer, args=(connection, whence), daemon=True, name="thinwire-link").start()

    threading.Thread(target=accept, daemon=True, name="thinwire-links").start()
    found: tuple[str, int] = listener.getsockname()[:2]
    return found


def dial(
    owner: Owner,
    address: tuple[str, int],
    hello: Callable[[], Words],
    wanted: Callable[[], bool | None],
    certificate: Certificate | None = None,
) -> None:
    """Keep a link to an address, in a thread; `wanted` says whether it is now, None to stop; `hello` is said first."""

    def keep() -> None:
        pause = threading.Event()
        while (now := wanted()) is not None:
            with suppress(OSError):
                if now:
                    connection = socket.create_connection(address, timeout=SILENCE)
                    link = Link(_secured(connection, certificate, answers=False), owner)
                    link.send(hello())
                    link.listen()
            pause.wait(_TICK / 2)

    threading.Thread(target=keep, daemon=True, name="thinwire-dial").start()


def _secured(connection: socket.socket, certificate: Certificate | None, *, answers: bool) -> socket.socket:
    """Return a connection with whom we trust. Raises OSError for others, and closes it."""
    if certificate is None:
        return connection
    try:
        connection.settimeout(SILENCE)
        return certificate.secured(connection, answers=answers)
    except OSError:
        connection.close()
        raise

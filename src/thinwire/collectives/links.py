"""Connections between workers that find each other by themselves, outside any process group.

A frame is `TWOS`, the length of its words (u32) and of its body (u64), little-endian; then the words, as JSON, and the
body. Who has nothing to say says so every second, and who is silent for longer than `SILENCE` is taken for gone.
"""

import json
import socket
import struct
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, Protocol, final

SILENCE = 4.0
"""Seconds after which a worker that says nothing is gone."""
_TICK = 1.0
_HEAD = struct.Struct("<4sIQ")
_MAGIC, _MOST_WORDS = b"TWOS", 1 << 20
_PIECE = 1 << 16  # bytes; a time-out counts for each

Words = Mapping[str, Any]


class Owner(Protocol):
    """Whose links these are."""

    def limit(self) -> int:
        """Return the most bytes that a body may have."""

    def status(self) -> Words:
        """Return what a worker with nothing to say says."""

    def take(self, link: "Link", words: Words, body: bytes) -> None:
        """Take a frame. Raises ValueError for one that must not come."""

    def lost(self, link: "Link", *, silent: bool) -> None:
        """A link has ended; `silent`: nothing was heard, so the other side may yet be there."""


@final
class Link:
    """A connection to another worker, whose id is `peer` once it has said so."""

    def __init__(self, connection: socket.socket, owner: Owner) -> None:
        self.peer = ""
        self._socket, self._owner = connection, owner
        self._queue: SimpleQueue[tuple[bytes, bytes] | None] = SimpleQueue()
        connection.settimeout(SILENCE)
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
                if magic != _MAGIC or words > _MOST_WORDS or body > self._owner.limit():
                    raise ValueError(f"{magic!r} with {words} and {body} bytes is not a valid frame")
                self._owner.take(self, json.loads(self._read(words)), self._read(body))
        except TimeoutError:
            silent = True
        except (OSError, ValueError, KeyError, TypeError):
            pass
        finally:
            self.close()
            self._owner.lost(self, silent=silent)

    def close(self) -> None:
        """End the connection once what is queued has been sent, or cannot be."""
        self._queue.put(None)
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RD)

    def _say(self) -> None:
        with suppress(OSError), self._socket:
            while (frame := self._next()) is not None:
                words, body = frame
                self._write(_HEAD.pack(_MAGIC, len(words), len(body)) + words)
                self._write(body)
            self._socket.shutdown(socket.SHUT_RDWR)

    def _next(self) -> tuple[bytes, bytes] | None:
        try:
            return self._queue.get(timeout=_TICK)
        except Empty:
            return json.dumps(self._owner.status()).encode(), b""

    def _write(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            self._socket.sendall(rest[:_PIECE])
            rest = rest[_PIECE:]

    def _read(self, count: int) -> bytes:
        found = bytearray(count)
        rest = memoryview(found)
        while rest:
            got = self._socket.recv_into(rest)
            if not got:
                raise ConnectionError("the other side has closed the connection")
            rest = rest[got:]
        return bytes(found)


def serve(owner: Owner, host: str) -> tuple[str, int]:
    """Listen at a free port, in a thread. Return the address."""
    listener = socket.create_server((host, 0))

    def accept() -> None:
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=Link(connection, owner).listen, daemon=True, name="thinwire-link").start()

    threading.Thread(target=accept, daemon=True, name="thinwire-links").start()
    found: tuple[str, int] = listener.getsockname()[:2]
    return found


def dial(owner: Owner, host: str, port: int, hello: Callable[[], Words], wanted: Callable[[], bool | None]) -> None:
    """Keep a link to an address, in a thread; `wanted` says whether it is now, None to stop; `hello` is said first."""

    def keep() -> None:
        pause = threading.Event()
        while (now := wanted()) is not None:
            with suppress(OSError):
                if now:
                    link = Link(socket.create_connection((host, port), timeout=SILENCE), owner)
                    link.send(hello())
                    link.listen()
            pause.wait(_TICK / 2)

    threading.Thread(target=keep, daemon=True, name="thinwire-dial").start()

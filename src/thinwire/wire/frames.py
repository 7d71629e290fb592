"""Frames: a head of fixed size and a body, whose length is checked before room is made for it.

A frame travels in ZeroMQ messages of one part: the head, with the body if that is short, or else followed by pieces of
it. Little-endian: `TWPS`, protocol version (u16), kind (u8), flags (u8), number (u64), version of the parameters (u64),
the trainer's latest update that is on disk, as the server says (u64), an update's loss, NaN if its trainer tells none
(f64), length of the body (u64). Every message ends with its number (u64) among those that go this way over this
connection, from 0: CURVE lets nobody change or repeat one, but whoever carries them may leave one out.
"""

import math
import struct
from collections import deque
from collections.abc import Callable, Mapping
from enum import IntEnum, IntFlag
from typing import NamedTuple, final

Bytes = bytes | memoryview
PROTOCOL = 12
MAGIC = b"TWPS"
HEADER = struct.Struct("<4sHBBQQQdQ")
PIECE = 1 << 16
"""Bytes of a body in one message, at most: memory holds little twice, a stranger can have no more of it, and heartbeats
pass between two messages."""
WINDOW = 4
"""Updates and questions of a trainer that are not answered, at most: others wait on its side."""
NUMBER = 8
"""Bytes of a message's number."""
AROUND = 42
"""Bytes that CURVE and ZMTP put around a message with its number."""


class Kind(IntEnum):
    """What a frame is; an answer has the kind of what it answers.

    Either side pings, so that it shows if its last message was lost. BYE is answered when all has arrived. END says why
    the server hears no more.
    """

    PING = 0
    JOIN = 1
    UPDATE = 2
    FETCH = 3
    WATCH = 4
    BYE = 5
    END = 6


class Flag(IntFlag):
    """What else there is to know about a frame."""

    DRAINED = 1
    """Of an update: it is not compressed, and includes the residual."""
    SAVE = 2
    """Of a ping: save soon, as the trainer waits for it or its log is half full."""
    DROPPED = 4
    """Of an answer: the update was not finite and has not been applied."""
    BRIEF = 8
    """Of an update: others follow at once, so the answer may leave parameters out. Of an answer: it has none."""
    FINAL = 16
    """Of an END: the trainer cannot join again."""


LIFE = struct.Struct("<QQq")
"""At the start of the answer to JOIN: a number that the server drew when it started, and at which version that was."""


class FrameError(ValueError):
    """These bytes are not a frame that is allowed now. The connection ends; nothing else happens."""


class GoneError(ConnectionError):
    """The other side is gone, or something that it said. `fix`: what to do, if it is not to start the server."""

    def __init__(self, why: str, fix: str = "") -> None:
        super().__init__(f"{why}: {fix}" if fix else why)
        self.why, self.fix = why, fix


class Frame(NamedTuple):
    """A frame."""

    kind: Kind
    flags: Flag
    number: int
    version: int
    saved: int
    loss: float
    body: memoryview

    @property
    def words(self) -> str:
        """What it says, if it says why."""
        return bytes(self.body).decode(errors="replace")


def parse(message: Bytes, limits: Mapping[Kind, int]) -> Frame:
    """Return the frame that begins so, with room for its body, or raise FrameError; `limits`: of bodies."""
    if len(message) < HEADER.size:
        raise FrameError(f"a message of {len(message)} bytes; expected a header of {HEADER.size}")
    magic, protocol, kind, flags, number, version, saved, loss, length = HEADER.unpack_from(message)
    if magic != MAGIC or protocol != PROTOCOL:
        raise FrameError(f"got {bytes(magic)!r}, protocol {protocol}; expected {MAGIC!r}, protocol {PROTOCOL}")
    if kind not in limits or flags > sum(Flag):
        raise FrameError(f"got kind {kind} with flags {flags}; expected one of {[int(each) for each in limits]}")
    if length > limits[Kind(kind)]:
        raise FrameError(f"a {Kind(kind).name} of {length} bytes; at most {limits[Kind(kind)]} bytes are allowed")
    return Frame(Kind(kind), Flag(flags), number, version, saved, loss, memoryview(bytearray(length)))


def numbered(message: Bytes, number: int) -> bytes:
    """Return a message as it travels: the number-th of this side, over this connection."""
    return b"".join((message, number.to_bytes(NUMBER, "little")))


@final
class Talk:
    """What comes over a connection, as frames, and what has yet to leave, as messages; either side has one.

    `limits`: of the bodies that may come; the owner changes them as it goes on. `counted`: bytes sent and received, to
    which these are added.
    """

    def __init__(self, limits: Mapping[Kind, int], counted: list[int] | None = None) -> None:
        self.limits, self.counted, self.outbox = limits, counted or [0, 0], deque[Bytes]()
        self._said = self._heard = self._filled = 0
        self._frame: Frame | None = None

    def say(
        self,
        kind: Kind,
        *body: Bytes,
        number: int = 0,
        version: int = 0,
        saved: int = 0,
        loss: float = math.nan,
        flags: int = 0,
    ) -> None:
        """Put a frame into the outbox, whose body is these parts."""
        length = sum(map(len, body))
        head = HEADER.pack(MAGIC, PROTOCOL, kind, flags, number, version, saved, loss, length)
        if length <= PIECE:
            self.outbox.append(b"".join((head, *body)))
        else:
            self.outbox.append(head)
            self.outbox.extend(part[start : start + PIECE] for part in body for start in range(0, len(part), PIECE))

    def flush(self, send: Callable[[bytes], bool]) -> bool:
        """Send messages while there is room for them, which `send` returns. Return whether some are left."""
        while self.outbox and send(message := numbered(self.outbox[0], self._said)):
            self.outbox.popleft()
            self._said += 1
            self.counted[0] += len(message) + AROUND
        return bool(self.outbox)

    def take(self, message: Bytes) -> Frame | None:
        """Take in a message, and return the frame if that is its last one. Raises FrameError; GoneError for a gap."""
        self.counted[1] += len(message) + AROUND
        number, message = int.from_bytes(message[-NUMBER:], "little"), memoryview(message)[:-NUMBER]
        if number != self._heard:
            raise GoneError(f"message {number} came, but {self._heard} is next: something was lost on the way")
        self._heard += 1
        if self._frame is None:
            self._frame, self._filled, message = parse(message, self.limits), 0, message[HEADER.size :]
        body, end = self._frame.body, self._filled + len(message)
        if end > len(body):
            raise FrameError(f"a body of {end} bytes; its header says {len(body)}")
        body[self._filled : end], self._filled = message, end
        if end < len(body):
            return None
        done, self._frame = self._frame, None
        return done

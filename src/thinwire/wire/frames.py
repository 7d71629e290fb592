"""Frames: a head of fixed size and a body, whose length is checked before room is made for it.

A frame travels in ZeroMQ messages of one part: the head, with the body if that is short, or else followed by pieces of
it. Little-endian: `TWPS`, protocol version (u16), kind (u8), flags (u8), number (u64), version of the parameters (u64),
length of the body (u64). Every message ends with its number (u64) among those that go this way over this connection,
from 0: CURVE lets nobody change or repeat one, but whoever carries them may leave one out.
"""

import struct
from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum, IntFlag
from typing import NamedTuple, final

Bytes = bytes | memoryview
PROTOCOL = 9
MAGIC = b"TWPS"
HEADER = struct.Struct("<4sHBBQQQ")
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

    Either side pings, so that it shows if its last message was lost. A ping from the server has the number of the
    trainer's latest update that is on disk. BYE is answered when all has arrived. END says why the server hears no
    more.
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
    """Of a ping: the trainer's log is half full, so the server should save soon."""
    DROPPED = 4
    """Of an answer: the update was not finite and has not been applied."""
    BRIEF = 8
    """Of an update: others follow at once, so the answer may leave parameters out. Of an answer: it has none."""
    FINAL = 16
    """Of an END: the trainer cannot join again."""


NONE = Flag(0)
DURABLE = struct.Struct("<Q")
"""At the start of an answer to UPDATE or JOIN: the trainer's latest update that is on disk."""
LIFE = struct.Struct("<QQ")
"""After that to JOIN: a number that this start of the server drew, and the version that it went on from."""
LOSS = struct.Struct("<d")
"""At the start of an update, before its sections: the loss that the trainer tells, NaN if it tells none."""


class FrameError(ValueError):
    """These bytes are not a frame that is allowed now. The connection ends; nothing else happens."""


class GoneError(ConnectionError):
    """The other side is gone, or something that it said. `fix`: what to do, if it is not to start the server."""

    def __init__(self, why: str, fix: str = "") -> None:
        super().__init__(f"{why}: {fix}" if fix else why)
        self.fix = fix


class Frame(NamedTuple):
    """A frame."""

    kind: Kind
    flags: Flag
    number: int
    version: int
    body: memoryview

    @property
    def words(self) -> str:
        """What it says, if it says why."""
        return bytes(self.body).decode(errors="replace")


def parse(message: Bytes, limits: Mapping[Kind, int]) -> Frame:
    """Return the frame that begins so, with room for its body, or raise FrameError; `limits`: of bodies."""
    if len(message) < HEADER.size:
        raise FrameError(f"a message of {len(message)} bytes; expected a header of {HEADER.size}")
    magic, protocol, kind, flags, number, version, length = HEADER.unpack_from(message)
    if magic != MAGIC or protocol != PROTOCOL:
        raise FrameError(f"got {bytes(magic)!r}, protocol {protocol}; expected {MAGIC!r}, protocol {PROTOCOL}")
    if kind not in limits or flags > sum(Flag):
        raise FrameError(f"got kind {kind} with flags {flags}; expected one of {[int(each) for each in limits]}")
    if length > limits[Kind(kind)]:
        raise FrameError(f"a {Kind(kind).name} of {length} bytes; at most {limits[Kind(kind)]} bytes are allowed")
    return Frame(Kind(kind), Flag(flags), number, version, memoryview(bytearray(length)))


def messages(kind: Kind, body: Sequence[Bytes], number: int = 0, version: int = 0, flags: int = 0) -> Iterator[Bytes]:
    """Yield the messages of a frame whose body is these parts."""
    length = sum(map(len, body))
    head = HEADER.pack(MAGIC, PROTOCOL, kind, flags, number, version, length)
    if length <= PIECE:
        yield b"".join((head, *body))
        return
    yield head
    for part in body:
        for start in range(0, len(part), PIECE):
            yield part[start : start + PIECE]


def numbered(message: Bytes, number: int) -> bytes:
    """Return a message as it travels: the number-th of this side, over this connection."""
    return b"".join((message, number.to_bytes(NUMBER, "little")))


@final
class Inbox:
    """Makes frames of one sender's messages. `limits`: for `parse`; the owner changes them as it goes on."""

    def __init__(self, limits: Mapping[Kind, int]) -> None:
        self.limits, self._filled, self._next = limits, 0, 0
        self._frame: Frame | None = None

    def take(self, message: Bytes) -> Frame | None:
        """Take in a message, and return the frame if that is its last one. Raises FrameError; GoneError for a gap."""
        number, message = int.from_bytes(message[-NUMBER:], "little"), memoryview(message)[:-NUMBER]
        if number != self._next:
            if message[: len(MAGIC)] == MAGIC:
                parse(message, self.limits)  # up to protocol 7 there were no numbers
            raise GoneError(f"message {number} came, but {self._next} is next: something was lost on the way")
        self._next += 1
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

"""One peer of a server, which is a trainer when it has joined."""

import json
import math
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, final

from thinwire.codecs import Codec
from thinwire.reducer import Reducer
from thinwire.server.central import Central
from thinwire.server.downlink import Downlink, read_update, rows_for
from thinwire.server.rules import Rule
from thinwire.server.saving import Saving
from thinwire.server.status import ServerStatus, TrainerStatus
from thinwire.wire.frames import ACKNOWLEDGED, AROUND, LIFE, LOSS, NONE, Bytes, Flag, Frame, FrameError, Inbox, Kind
from thinwire.wire.frames import messages as messages_of
from thinwire.wire.layout import pack
from thinwire.wire.rows import longest_question
from thinwire.wire.terms import difference

_WORDS = 10_000  # characters of a refusal, so fewer than 64 KiB
_FIRST = {
    Kind.PING: 0,
    Kind.BYE: 0,
    Kind.JOIN: 1 << 24,
    Kind.WATCH: 0,
}  # what may come at first, and how long it may be
_QUEUED = 1024  # updates and questions of a trainer that may wait here; it sends few


@final
@dataclass(kw_only=True)
class Shared:
    """What all sessions of a server share. `lock` guards everything that is not fixed."""

    central: Central
    rule: Rule
    lock: threading.Condition
    recipe: Reducer
    codec: Codec | None
    timeout: float
    agreed: Mapping[str, str]
    saving: Saving
    sessions: "dict[str, Session]" = field(default_factory=dict)
    ended: list[int] = field(default_factory=lambda: [0, 0])
    """Bytes sent and received over connections that have ended."""
    lost: float
    """When a trainer last left without a BYE, or the server itself came back: `time.monotonic` seconds."""

    def status(self) -> ServerStatus:
        """Return the server's status. The caller holds the lock."""
        sessions = self.sessions.values()
        return ServerStatus(
            version=self.central.version,
            staleness=dict(self.central.staleness),
            updates=dict(self.central.applied),
            trainers={name: session.status() for name, session in self.sessions.items()},
            dropped=self.central.dropped,
            sent_bytes=self.ended[0] + sum(each.sent for each in sessions),
            received_bytes=self.ended[1] + sum(each.received for each in sessions),
        )


class RefusedError(ConnectionError):
    """This trainer cannot join, or go on: the words that it is told. `logged`: those for the server's log."""

    def __init__(self, told: str, logged: str = "") -> None:
        super().__init__(told)
        self.logged = logged or told


@final
class Session:
    """What a peer has said, and what it is still to be told. The caller holds the server's lock."""

    def __init__(self, shared: Shared, peer: bytes, host: str) -> None:
        self._shared, self.peer, self.host, self.trainer = shared, peer, host, ""
        self._inbox, self.outbox, self.sent = Inbox(_FIRST), deque[Bytes](), 0
        self._loss, self._since = math.nan, time.monotonic()
        self._downlink = Downlink(shared.central, shared.codec)
        self._brief, self._queue = NONE, deque[Frame]()
        self._busy = self.over = False

    @property
    def received(self) -> int:
        """Bytes that have come."""
        return self._inbox.received

    def status(self) -> TrainerStatus:
        """Return what is known of this trainer."""
        central = self._shared.central
        return TrainerStatus(
            updates=central.applied.get(self.trainer, 0),
            behind=central.behind[self.trainer],
            loss=self._loss if math.isfinite(self._loss) else None,
            sent_bytes=self.sent,
            received_bytes=self.received,
            quiet=time.monotonic() - self._since,
        )

    def take(self, message: Bytes) -> None:
        """Take in a message, and do what it asks for. Raises FrameError, PayloadError or RefusedError."""
        if self.over or (frame := self._inbox.take(message)) is None:
            return
        match frame.kind:
            case Kind.PING:
                self._save_if_asked(frame)
            case Kind.WATCH:
                self.say(Kind.STATUS, json.dumps(asdict(self._shared.status())).encode())
            case Kind.JOIN:
                self._join(_asked(frame))
            case _:
                if frame.kind is Kind.BYE:
                    self.say(Kind.END)  # all has arrived
                self._queue.append(frame)
                if len(self._queue) > _QUEUED:
                    raise FrameError("more updates and requests in flight than a trainer sends")
                self.go_on()

    def go_on(self) -> None:
        """Answer what has come, up to an update that has to wait. Raises FrameError, PayloadError or RefusedError."""
        while self._queue and not self._busy:
            frame = self._queue.popleft()
            if frame.kind is Kind.UPDATE:
                self._update(frame)
            elif frame.kind is Kind.BYE:
                self.leave(goodbye=True)
            else:
                body = rows_for(self._shared.central, frame.body)
                self.say(Kind.ROWS, *body, number=frame.number, version=self._shared.central.version)

    def say(self, kind: Kind, *body: Bytes, number: int = 0, version: int = 0, flags: Flag = NONE) -> None:
        """Put a frame into the outbox."""
        for each in messages_of(kind, body, number=number, version=version, flags=flags):
            self.outbox.append(each)
            self.sent += len(each) + AROUND

    def ping(self) -> None:
        """Tell the trainer what is on disk, unless it is being told something else."""
        if not self.outbox:
            self.say(Kind.PING, number=self._durable())

    def answer(self, number: int, *, dropped: bool) -> None:
        """Answer an update which the rule has let go; it may have come over an earlier connection."""
        if self._busy:
            self._busy = False
            self._reply(number, (Flag.DROPPED if dropped else NONE) | self._brief)

    def end(self, kind: Kind, why: str) -> None:
        """Say why it ends, and hear no more."""
        self.say(kind, why[:_WORDS].encode())
        self.leave(goodbye=False)

    def hung_up(self) -> None:
        """Count the trainer out whose connection is closed, unless it has said BYE after what is still to be done."""
        if not any(frame.kind is Kind.BYE for frame in self._queue):
            self.leave(goodbye=False)

    def leave(self, *, goodbye: bool) -> None:
        """Count the trainer out; once."""
        shared, self.over = self._shared, True
        self._queue.clear()
        if shared.sessions.get(self.trainer) is self:
            del shared.sessions[self.trainer]
            shared.rule.left(self.trainer, goodbye=goodbye)
            shared.lost = shared.lost if goodbye else time.monotonic()
            shared.ended[0] += self.sent
            shared.ended[1] += self.received
        shared.lock.notify_all()

    def _join(self, asked: Mapping[str, Any]) -> None:
        shared, central = self._shared, self._shared.central
        if central.failure:
            raise RefusedError(central.failure)
        if found := difference(shared.agreed, asked["agreed"]):
            raise RefusedError(found.told, found.logged)
        if (earlier := shared.sessions.get(asked["trainer"])) is not None:  # it has not been noticed to be dead
            earlier.end(Kind.END, "this trainer has joined anew")
        self.trainer = asked["trainer"]
        shared.sessions[self.trainer] = self
        shared.rule.joined(self.trainer, self.host)
        layout = central.layout
        self._inbox.limits = {
            **({Kind.FETCH: longest_question(layout)} if layout.fetched else {}),
            Kind.PING: 0,
            Kind.BYE: 0,
            Kind.UPDATE: LOSS.size + layout.limit(layout.of_recipe(shared.recipe, 0), layout.rows),
        }
        life, body = LIFE.pack(central.life, central.restored), pack(self._downlink.whole())
        self.say(Kind.WELCOME, self._acknowledged(), life, *body, version=central.version)

    def _update(self, frame: Frame) -> None:
        shared = self._shared
        self._save_if_asked(frame)
        known = shared.central.applied.get(self.trainer, 0)
        if frame.number > known + 1:
            raise FrameError(f"update {frame.number}; expected {known + 1}, the next of this trainer")
        if frame.number <= known:
            self._reply(frame.number, frame.flags & Flag.BRIEF)
            return
        update = read_update(shared.central.layout, shared.recipe, self.trainer, frame)
        self._loss, self._since = update.loss, time.monotonic()
        self._busy, self._brief = True, frame.flags & Flag.BRIEF
        shared.rule.submit(update)

    def _save_if_asked(self, frame: Frame) -> None:
        if frame.flags & Flag.SAVE:
            self._shared.saving.soon.set()

    def _reply(self, number: int, flags: Flag) -> None:
        body = [] if flags & Flag.BRIEF else pack(self._downlink.news(number))
        version = self._shared.central.version
        self.say(Kind.PARAMETERS, self._acknowledged(), *body, number=number, version=version, flags=flags)

    def _durable(self) -> int:
        return self._shared.saving.latest(self.trainer)

    def _acknowledged(self) -> bytes:
        return ACKNOWLEDGED.pack(self._shared.central.applied.get(self.trainer, 0), self._durable())


def _asked(frame: Frame) -> dict[str, Any]:
    """Return what a JOIN says. Raises FrameError."""
    try:
        asked = json.loads(bytes(frame.body))
        who, agreed = asked["trainer"], asked["agreed"]
        if len(who) != 32 or int(who, 16) < 0 or not all(isinstance(x, str) for x in agreed.values()):
            raise ValueError
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise FrameError("a JOIN without a trainer's number and parameters") from error
    return {"trainer": who, "agreed": agreed}

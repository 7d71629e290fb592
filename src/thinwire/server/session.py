"""One trainer's connection, as the server sees it."""

import json
import math
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, final

from thinwire.codecs import Codec
from thinwire.errors import PayloadError, ServerError
from thinwire.reducer import Reducer
from thinwire.server.central import Central, Update
from thinwire.server.exchange import LOSS, Downlink, read_update
from thinwire.server.fetching import longest_question, rows_for
from thinwire.server.frames import NONE, Flag, Frame, FrameError, GoneError, Kind, Wire
from thinwire.server.joining import challenge, difference
from thinwire.server.layout import pack
from thinwire.server.rules import TICK, Rule
from thinwire.server.saving import Saving
from thinwire.server.status import ServerStatus, TrainerStatus

_WORDS = 10_000  # characters of a refusal, so fewer than 64 KiB
_FIRST = {Kind.PING: 0, Kind.JOIN: 1 << 24, Kind.WATCH: 0}  # what may come at first, and how long it may be
ACKNOWLEDGED = struct.Struct("<QQ")
"""At the start of an answer: the trainer's latest update that was applied, and the latest that is on disk."""
LIFE = struct.Struct("<QQ")
"""After that in a WELCOME: a number that this start of the server drew, and the version that it went on from."""


@final
@dataclass(kw_only=True)
class Shared:
    """What all sessions of a server share. `lock` guards everything that is not fixed."""

    central: Central
    rule: Rule
    lock: threading.Condition
    recipe: Reducer
    codec: Codec | None
    secret: bytes = field(repr=False)
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
        wires = [session.wire for session in self.sessions.values()]
        return ServerStatus(
            version=self.central.version,
            staleness=dict(self.central.staleness),
            updates=dict(self.central.applied),
            trainers={name: session.status() for name, session in self.sessions.items()},
            dropped=self.central.dropped,
            sent_bytes=self.ended[0] + sum(wire.sent for wire in wires),
            received_bytes=self.ended[1] + sum(wire.received for wire in wires),
        )


class RefusedError(ConnectionError):
    """This trainer cannot join; it has been told why."""


@final
class Session:
    """One trainer's connection, from joining to leaving. `run` serves it, in a thread of its own."""

    def __init__(self, connection: socket.socket, shared: Shared) -> None:
        self._shared = shared
        self.wire = Wire(connection, timeout=shared.timeout, limits=_FIRST)
        self.trainer, self._goodbye = "", False
        self._loss, self._since = math.nan, time.monotonic()
        self._downlink = Downlink(shared.central, shared.codec)

    def run(self, let_in: Callable[[], None]) -> None:
        """Converse until the trainer leaves; call `let_in` once it proved the secret; unanswered updates are void."""
        try:
            challenge(self.wire, self._shared.secret)
            let_in()
            self._begin()
            while self.answer(self.wire.receive()):
                pass
            self._goodbye = True
        except (GoneError, FrameError, PayloadError):
            if self.trainer:
                self._shared.lost = time.monotonic()
            raise
        finally:
            self._leave()

    def answer(self, frame: Frame) -> bool:
        """Do what a frame asks for. Return whether more may come."""
        match frame.kind:
            case Kind.PING:
                self._save_if_asked(frame)
                return True
            case Kind.UPDATE:
                self._update(frame)
                return True
            case Kind.FETCH:
                self._fetch(frame)
                return True
            case Kind.WATCH:
                self._show()
                return True
        return False

    def status(self) -> TrainerStatus:
        """Return what is known of this trainer. The caller holds the server's lock."""
        central = self._shared.central
        return TrainerStatus(
            updates=central.applied.get(self.trainer, 0),
            behind=central.behind[self.trainer],
            loss=self._loss if math.isfinite(self._loss) else None,
            sent_bytes=self.wire.sent,
            received_bytes=self.wire.received,
            quiet=time.monotonic() - self._since,
        )

    def ping_if_due(self) -> None:
        """Send a ping if one is due; if the server has failed, tell the trainer why. Raises GoneError."""
        if self._shared.central.failure and self.trainer:
            self._refuse(self._shared.central.failure)
        else:
            self.wire.ping_if_due()

    def _begin(self) -> None:
        """Find out who this is: a trainer that joins, or somebody who watches."""
        frame = self.wire.receive()
        while frame.kind is Kind.PING:
            frame = self.wire.receive()
        self.wire.heed(frame.number)
        if frame.kind is Kind.JOIN:
            self._join(_asked(frame))
        else:
            self.wire.limits = dict.fromkeys((Kind.PING, Kind.BYE, Kind.WATCH), 0)
            self._show()

    def _show(self) -> None:
        with self._shared.lock:
            status = self._shared.status()
        self.wire.send(Kind.STATUS, json.dumps(asdict(status)).encode())

    def _join(self, asked: Mapping[str, Any]) -> None:
        shared = self._shared
        if failure := shared.central.failure:
            self._refuse(failure)
            raise RefusedError(failure)
        if found := difference(shared.agreed, asked["agreed"]):
            self._refuse(found.told)
            raise RefusedError(found.logged)
        self._replace(asked["trainer"])
        layout = shared.central.layout
        self.wire.limits = {
            **({Kind.FETCH: longest_question(layout)} if layout.fetched else {}),
            Kind.PING: 0,
            Kind.BYE: 0,
            Kind.UPDATE: LOSS.size + layout.limit(layout.of_recipe(shared.recipe, 0), layout.rows),
        }
        self.wire.note = self._durable
        with shared.lock:
            shared.rule.joined(self.trainer, self.wire.peer)
            version, acknowledged = shared.central.version, self._acknowledged()
            body = pack(self._downlink.whole())
        life = LIFE.pack(shared.central.life, shared.central.restored)
        self.wire.send(Kind.WELCOME, acknowledged, life, *body, number=self.wire.milliseconds, version=version)

    def _replace(self, trainer: str) -> None:
        """Take the place of this trainer's earlier connection, if there is one that has not been noticed to be dead."""
        shared = self._shared
        with shared.lock:
            while (earlier := shared.sessions.get(trainer)) is not None:
                earlier.wire.close()
                shared.lock.wait(TICK)
                self._meanwhile()
            shared.sessions[trainer], self.trainer = self, trainer

    def _leave(self) -> None:
        self.wire.close()
        shared = self._shared
        with shared.lock:
            if shared.sessions.get(self.trainer) is self:
                del shared.sessions[self.trainer]
                shared.rule.left(self.trainer, goodbye=self._goodbye)
            shared.lock.notify_all()

    def _update(self, frame: Frame) -> None:
        shared, dropped = self._shared, False
        self._save_if_asked(frame)
        with shared.lock:
            known = shared.central.applied.get(self.trainer, 0)
        if frame.number > known + 1:
            raise FrameError(f"update {frame.number}; expected {known + 1}, the next of this trainer")
        if frame.number == known + 1:
            update = read_update(
                shared.central.layout,
                shared.recipe,
                self.trainer,
                frame.number,
                frame.version,
                frame.flags,
                frame.body,
            )
            self._loss, self._since = update.loss, time.monotonic()
            dropped = self._submit(update)
        self._reply(frame.number, (Flag.DROPPED if dropped else NONE) | (frame.flags & Flag.BRIEF))

    def _save_if_asked(self, frame: Frame) -> None:
        if frame.flags & Flag.SAVE:
            self._shared.saving.soon.set()

    def _submit(self, update: Update) -> bool:
        """Have it applied. If the server cannot any more, tell the trainer why, and raise RefusedError."""
        try:
            return self._shared.rule.submit(update, self._meanwhile)
        except ServerError as error:
            self._refuse(str(error))
            raise RefusedError(str(error)) from error

    def _refuse(self, why: str) -> None:
        self.wire.send(Kind.REFUSED, why[:_WORDS].encode())

    def _reply(self, number: int, flags: Flag) -> None:
        with self._shared.lock:
            version, acknowledged = self._shared.central.version, self._acknowledged()
            news = None if flags & Flag.BRIEF else self._downlink.news(number)
        body = pack(news.sections()) if news else []
        self.wire.send(Kind.PARAMETERS, acknowledged, *body, number=number, version=version, flags=flags)

    def _fetch(self, frame: Frame) -> None:
        version, body = rows_for(self._shared.central, self._shared.lock, frame.body)
        self.wire.send(Kind.ROWS, *body, number=frame.number, version=version)

    def _meanwhile(self) -> None:
        if self.wire.gone():
            raise GoneError("the connection was closed")

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
        raise FrameError("a JOIN without a trainer's number and what it trains") from error
    return {"trainer": who, "agreed": agreed}

"""All that peers say to a server, one thing after the other, in the only thread that uses its socket."""

import json
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import Any, final

from thinwire.errors import PayloadError, ServerError
from thinwire.integrations.training.drift import difference
from thinwire.server.answers import Downlink, ServerStatus, TrainerStatus, rows_for
from thinwire.server.central import Central, read_update
from thinwire.server.rule import Rule
from thinwire.server.saving import Saving
from thinwire.wire import frames
from thinwire.wire.frames import Bytes, Flag, Frame, FrameError, GoneError, Kind, Talk
from thinwire.wire.sections import pack
from thinwire.wire.sockets import TICK, Listener

logger = logging.getLogger("thinwire")
_SOON = 0.01  # seconds until a message is tried again for which there was no room
_WORDS = 10_000  # characters of a refusal, so fewer than 64 KiB
_FIRST = {Kind.PING: 0, Kind.JOIN: 1 << 24, Kind.WATCH: 0}
"""What may come at first, and how long it may be."""


class RefusedError(ConnectionError):
    """This trainer cannot join, or go on, and why."""


@final
class Session:
    """What a peer has said, and what it is still to be told. The caller holds the server's lock."""

    def __init__(self, hub: "Hub", peer: bytes, host: str, descriptor: int = -1) -> None:
        self._hub, self.peer, self.host, self._descriptor, self.trainer = hub, peer, host, descriptor, ""
        self.talk, self.queue, self.over = Talk(_FIRST), deque[Frame](), False
        self._loss, self.since, self._downlink = math.nan, time.monotonic(), Downlink(hub.central)
        self.busy: Frame | None = None
        """The update that the rule has, without its body."""

    def status(self) -> TrainerStatus:
        """Return what is known of this trainer."""
        central, (sent, received) = self._hub.central, self.talk.counted
        return TrainerStatus(
            updates=central.applied.get(self.trainer, 0),
            behind=central.behind[self.trainer],
            loss=self._loss if math.isfinite(self._loss) else None,
            sent_bytes=sent,
            received_bytes=received,
            quiet=time.monotonic() - self.since,
        )

    def take(self, message: Bytes) -> None:
        """Take in a message, and do what it asks for. Raises FrameError, GoneError, PayloadError or RefusedError."""
        if self.over or (frame := self.talk.take(message)) is None:
            return
        match frame.kind:
            case Kind.PING:
                if frame.flags & Flag.SAVE:
                    self._hub.saving.soon.set()
            case Kind.JOIN:
                self._join(_asked(frame))
            case _:
                if frame.kind is Kind.BYE:
                    self.say(Kind.BYE)  # all has arrived
                self.queue.append(frame)
                if len(self.queue) > frames.WINDOW + 1:
                    raise FrameError(f"{len(self.queue)} unanswered requests; expected at most {frames.WINDOW}")
                self.go_on()

    def go_on(self) -> None:
        """Answer what has come, up to an update that has to wait, or an answer that has not left.

        Raises FrameError, PayloadError or RefusedError.
        """
        while self.queue and not self.busy and not self.talk.outbox:
            frame = self.queue.popleft()
            match frame.kind:
                case Kind.UPDATE:
                    self._update(frame)
                case Kind.BYE:
                    self.leave(goodbye=True)
                case Kind.WATCH:
                    self.say(Kind.WATCH, json.dumps(asdict(self._hub.status())).encode())
                case _:
                    self.say(Kind.FETCH, *rows_for(self._hub.central, frame.body), number=frame.number)

    def say(self, kind: Kind, *body: Bytes, number: int = 0, flags: int = 0) -> None:
        """Put a frame into the outbox, with what is on disk."""
        saved, version = self._hub.saving.latest(self.trainer), self._hub.central.version
        self.talk.say(kind, *body, number=number, version=version, saved=saved, flags=flags)

    def answer(self, *, dropped: bool) -> None:
        """Answer the update which the rule has let go."""
        if self.busy:
            self._reply(self.busy, Flag.DROPPED * dropped)
        self.busy = None

    def end(self, why: str, flags: int = 0) -> None:
        """Say why it ends, hear no more, and close the connection."""
        self.say(Kind.END, why[:_WORDS].encode(), flags=flags)
        self.leave(goodbye=False)
        self._hub.listener.end(self._descriptor, partial(self._hub.reaches, self))

    def hung_up(self) -> None:
        """Count the trainer out whose connection is closed, unless it has said BYE after what is still to be done."""
        if any(frame.kind is Kind.BYE for frame in self.queue):
            self.go_on()
        else:
            self.leave(goodbye=False)

    def leave(self, *, goodbye: bool) -> None:
        """Count the trainer out; once."""
        hub, self.over = self._hub, True
        self.queue.clear()
        if hub.sessions.get(self.trainer) is self:
            del hub.sessions[self.trainer]
            hub.counted = [sum(each) for each in zip(hub.counted, self.talk.counted, strict=True)]
            hub.rule.left(self.trainer, goodbye=goodbye)
        hub.lock.notify_all()

    def _join(self, asked: Mapping[str, Any]) -> None:
        hub, central = self._hub, self._hub.central
        layout = central.layout
        if central.failure:
            raise RefusedError(central.failure)
        if found := difference(layout.agreed, asked["agreed"]):
            both = "{} differs: the server has {}, this trainer has {}; use the server's".format(*found)
            raise RefusedError(both.encode(errors="replace").decode())  # JSON may hold half a character
        if (earlier := hub.sessions.get(asked["trainer"])) is not None:  # dead: its descriptor may be ours by now
            earlier.leave(goodbye=False)
        self.trainer = asked["trainer"]
        hub.sessions[self.trainer] = self
        ahead = hub.rule.joined(self.trainer, *asked["pace"])
        self.talk.limits = layout.asked
        life, body = frames.LIFE.pack(central.life, central.restored, ahead), pack(self._downlink.sections())
        self.say(Kind.JOIN, life, *body, number=central.applied.get(self.trainer, 0))

    def _update(self, frame: Frame) -> None:
        hub = self._hub
        known = hub.central.applied.get(self.trainer, 0)
        if frame.number > known + 1:
            raise FrameError(f"update {frame.number}; expected {known + 1}, the next of this trainer")
        if frame.number <= known:
            self._reply(frame)
            return
        update = read_update(hub.central.layout, self.trainer, frame)
        self._loss, self.since = frame.loss, time.monotonic()
        self.busy = frame._replace(body=memoryview(b""))
        hub.rule.submit(update)

    def _reply(self, frame: Frame, flags: int = 0) -> None:
        brief = frame.flags & Flag.BRIEF
        body = [] if brief else pack(self._downlink.sections(frame.number))
        self.say(Kind.UPDATE, *body, number=frame.number, flags=flags | brief)


@final
class Hub:
    """A server's peers, each a session, and what these share. `run` serves them until `close`; anybody may `tell`.

    `lock` guards everything that is not fixed. `sessions`: of trainers, by their numbers. `counted`: bytes sent and
    received over earlier ones.
    """

    def __init__(
        self, listener: Listener, central: Central, rule: Rule, saving: Saving, lock: threading.Condition
    ) -> None:
        self.central, self.rule, self.saving, self.lock, self.listener = central, rule, saving, lock, listener
        self.sessions, self.counted = dict[str, Session](), [0, 0]
        self._peers, self._gone = dict[bytes, Session](), list[Session]()
        self._due, self._told, self._open = 0.0, -math.inf, True

    @property
    def ended(self) -> bool:
        """Whether all have left for good, and hung up: who says BYE does so when it is answered. Hold the lock."""
        return self.rule.ended and not any(each.trainer for each in self._peers.values())

    def status(self) -> ServerStatus:
        """Return the server's status. The caller holds the lock, or another does for a step's sake."""
        sessions = dict(self.sessions)
        counted = (self.counted, *(session.talk.counted for session in sessions.values()))
        sent, received = map(sum, zip(*counted, strict=True))
        return ServerStatus(
            version=self.central.version,
            staleness=dict(self.central.staleness),
            updates=dict(self.central.applied),
            trainers={name: session.status() for name, session in sessions.items()},
            dropped=self.central.dropped,
            sent_bytes=sent,
            received_bytes=received,
        )

    def run(self) -> None:
        """Serve until `close`."""
        try:
            while self._open:
                self.listener.wait(_SOON if any(each.talk.outbox for each in self._peers.values()) else TICK)
                heard = self._take_all()
                with self.lock:
                    self._tick(heard)
        except Exception as error:
            logger.exception("the server has failed")
            with self.lock:
                self.central.failure = f"the server has failed: {type(error).__name__}: {error}"
        finally:
            self.listener.close()

    def tell(self) -> None:
        """Tell all trainers what is on disk now."""
        self._due = 0.0
        self.listener.bell.ring()

    def close(self) -> None:
        """Return from `run`, with all connections closed."""
        self._open = False
        self.listener.bell.ring()

    def _take_all(self) -> bool:
        """Hear what has come, for so long. Return whether it was all."""
        until = time.monotonic() + TICK
        while self._open and time.monotonic() < until:
            if (come := self.listener.receive()) is None:
                return True
            peer, message, host, descriptor = come
            with self.lock:
                session = self._peers.get(peer) or Session(self, peer, host, descriptor)
                self._peers[peer] = session
                self._try(session, partial(session.take, message))
                self.release()
        return False

    def _tick(self, heard: bool) -> None:
        """Do what is due now and then: count out who is gone, tell what is on disk, and say who is waited for.

        One that is gone counts as there until all is `heard` that came before: BYE may be the last word.
        """
        while heard and self._gone:
            gone = self._gone.pop()
            del self._peers[gone.peer]
            self._try(gone, gone.hung_up)
        if time.monotonic() > self._due:
            self._due = time.monotonic() + TICK
            for each in self._peers.values():
                if not each.talk.outbox:
                    each.say(Kind.PING)
            self._name()
        self.release()

    def _name(self) -> None:
        """Log who is waited for, now and then: a trainer that skips all its steps looks like one that is slow."""
        now = time.monotonic()
        since = min((each.since for each in self.sessions.values() if each.busy), default=now)
        if now - max(since, self._told) > self.rule.patience:
            self._told = now
            late = self.rule.late({who: each.host for who, each in self.sessions.items()})
            logger.warning("trainers have waited %.0f s for %s", now - since, late)

    def release(self) -> None:
        """Answer whose update has been applied, until nobody has another, and send all that there is to say."""
        with suppress(ServerError):  # which all are told
            while not self.central.failure and (answers := self.rule.release()):
                for who, dropped in answers.items():
                    session = self.sessions[who]
                    session.answer(dropped=dropped)
                    self._try(session, session.go_on)
                self.lock.notify_all()
        if self.central.failure:
            for each in list(self.sessions.values()):
                each.end(self.central.failure, Flag.FINAL)
        for each in self._peers.values():
            self._send(each)

    def reaches(self, session: Session) -> bool:
        """Send a peer a ping, and return whether it is connected."""
        with self.lock:
            session.say(Kind.PING)
            self._send(session)
            return session.talk.outbox.maxlen is None

    def _try(self, session: Session, call: Callable[[], None]) -> None:
        """Have a session do something; if it cannot, that ends it and no other."""
        try:
            call()
        except RefusedError as error:
            logger.warning("a trainer at %s was refused: %s", session.host, error)
            session.end(str(error), Flag.FINAL)
        except (FrameError, GoneError, PayloadError) as error:
            self.listener.refused(session.host, error)
            session.end(str(error))

    def _send(self, session: Session) -> None:
        """Send what there is room for; if that is all, go on with what has come."""
        try:
            talk, send = session.talk, partial(self.listener.send, session.peer)
            if talk.outbox and not talk.flush(send) and session.queue:
                self._try(session, session.go_on)
                self.listener.bell.ring()
        except GoneError:
            session.talk.outbox = deque(maxlen=0)  # nobody hears it
            self._gone.append(session)
            self.listener.bell.ring()


def _asked(frame: Frame) -> dict[str, Any]:
    try:
        asked = json.loads(bytes(frame.body))
        who, agreed, (ahead, sent, slack) = asked["trainer"], asked["agreed"], asked["pace"]
        if len(who) != 32 or int(who, 16) < 0 or not all(isinstance(x, str) for x in agreed.values()):
            raise ValueError
        if any(type(x) is not int or abs(x) >= 1 << 62 for x in (0 if ahead is None else ahead, sent, slack)):
            raise ValueError
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise FrameError("a JOIN without a trainer's number and parameters") from error
    return {"trainer": who, "agreed": agreed, "pace": (ahead, sent, slack)}

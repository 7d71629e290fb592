"""One server, as a trainer sees it: its parameters, a connection that may be made anew, updates that may be lost."""

import itertools
import json
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import NamedTuple, final

import torch
from torch import Tensor, nn

from thinwire.errors import FingerprintError, PayloadError, ServerError
from thinwire.trainer.contents import Base, Copy, Uplink
from thinwire.wire.frames import LIFE, WINDOW, Bytes, Flag, Frame, FrameError, GoneError, Kind, Talk
from thinwire.wire.layout import Layout
from thinwire.wire.rendezvous import ticket
from thinwire.wire.sections import asking, pack
from thinwire.wire.sockets import TICK, Bell, Link

logger = logging.getLogger("thinwire")


@final
@dataclass
class Shared:
    """What a trainer's channels share: who waits for one server hears of the `error` of another, which `told` was.

    By how much it is `ahead` of its updates' numbers, on all servers that it has `joined`, each in its turn. The first
    decides, unless another is far ahead of it. The others are told, if need be once more.
    """

    ahead: int | None = None
    joined: set[int] = field(default_factory=set)
    turn: threading.Lock = field(default_factory=threading.Lock)
    changed: threading.Condition = field(default_factory=threading.Condition)
    error: Exception | None = None
    told: Exception | None = None


@final
@dataclass(frozen=True)
class Settings:
    """How a trainer (32 hexadecimal digits) talks to a server, the `index`-th: seconds of patience, bytes of log."""

    address: str
    index: int
    ticket: str | os.PathLike[str] = field(repr=False)
    trainer: str
    timeout: float
    patience: float
    room: int
    shared: Shared


class Request(NamedTuple):
    """What a server is sent, in this order: an update, a question for rows, or a word."""

    order: int
    kind: Kind
    number: int = 0
    body: Sequence[Bytes] = ()
    base: Base = Base(0, 0)
    loss: float = math.nan
    flags: int = 0


_SAVE, _BYE = Request(0, Kind.PING, flags=Flag.SAVE), Request(0, Kind.BYE)


@final
class Channel:
    """Sends updates to one server, in order, and takes its answers into the trainer's `copy`.

    An update stays in the log until the server says that it is on disk. After a lost connection the channel joins again
    and goes on with the first that the server has not applied. Its own thread alone uses the connection.
    """

    def __init__(self, settings: Settings, layout: Layout, model: nn.Module) -> None:
        self._settings, self.copy = settings, Copy(layout, model)
        self.layout, self.uplink = layout, Uplink(layout, settings.trainer, self.copy.places.device)
        self._shared, self._changed = settings.shared, settings.shared.changed
        self._bell, self._orders = Bell(), itertools.count(1)
        self._log, self._logged = dict[int, Request](), 0  # updates that are not on disk, by number, and their bytes
        self._open = dict[int, tuple[Request, Sequence[Tensor]]]()  # questions, by number, and for which rows
        self._floors, self._life, self._ahead = list[int](), 0, 0
        self.counted = [0, 0]
        """Bytes sent and received, headers included."""
        self._queue, self._waiting = deque[Request](), 0  # what has yet to be sent, and how many have no answer
        self._full = self._joined = False
        self._answered = self.saved = self.dropped = 0
        """`saved`: the latest update that the server has on disk; of one without a checkpoint, that it applied."""
        self._goodbye: bool | None = None  # what `close` was told
        self._left = False  # whether the server has answered BYE
        self._sound, self._deadline = True, 0.0  # whether a loss now is one of its own, and until when it is borne
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        try:
            self.wait()
        except BaseException:
            self.close(goodbye=False)
            raise

    @property
    def staged_bytes(self) -> int:
        """Bytes of the updates that may have to be sent once more, and of the vectors that are encoded."""
        return self._logged + self.uplink.staged

    def send(self, number: int, base: Base, body: Sequence[Bytes], *, loss: float, flags: int) -> None:
        """Log an update, to be sent. Does not wait, as whoever waits may be interrupted. One thread at a time."""
        with self._changed:
            update = Request(next(self._orders), Kind.UPDATE, number, body, base, loss, flags)
            self._log[number] = update
            self._logged += sum(map(len, body))
            self._full |= self._logged > self._settings.room // 2
            self._queue.append(update)
        self._bell.ring()

    def wait_for_room(self) -> None:
        """Wait while the log is too full, unless by one update alone. Raises ServerError."""
        with self._changed:
            self._until(lambda: len(self._log) < 2 or self._logged <= self._settings.room)
            self.check()

    def wait(self, update: int = 0, question: int = 0) -> None:
        """Wait until this has joined, and both are answered. Raises ServerError if one of them never will be."""

        def so() -> bool:
            return bool(self._floors) and self._answered >= update and question not in self._open

        with self._changed:
            self._changed.wait_for(lambda: self._shared.error or so())
            if not so():
                self.check()

    def fetch(self, ids: Mapping[str, Tensor]) -> int:
        """Ask for the rows that this server has, and return the question's number, 0 for none. Raises ServerError."""
        none = torch.empty(0, dtype=torch.int64, device="cpu")
        keys = [ids.get(each.name, none) for each in self.layout.fetched]
        if not any(each.numel() for each in keys):
            return 0
        body = pack([asking(*each) for each in zip(self.layout.fetched, keys, strict=True)])
        with self._changed:
            self.check()
            number = next(self._orders)
            self._open[number] = Request(number, Kind.FETCH, number, body), keys
            self._queue.append(self._open[number][0])
        self._bell.ring()
        return number

    def settle(self, seconds: float) -> bool:
        """Have the server save once it has all that was sent, and wait for that, at most so long. Return whether."""
        with self._changed:
            last = next(reversed(self._log), 0)  # other threads may go on
            self._until(lambda: self.saved >= last, seconds)
            return self.saved >= last

    def _until(self, enough: Callable[[], bool], seconds: float | None = None) -> None:
        """Wait until enough is saved, or this has ended. Have the server save when it has all that is logged now.

        Over each connection: what an earlier one was told may be lost, and a server that started again has gone back.
        """
        last, asked = next(reversed(self._log), 0), 0

        def so() -> bool:
            nonlocal asked
            done = bool(self._shared.error) or enough()
            if not done and self._answered >= last and asked != len(self._floors):
                asked, self._full = len(self._floors), True
                self._bell.ring()
            return done

        self._changed.wait_for(so, seconds)

    def stop(self, *, goodbye: bool) -> None:
        """Wake all waiting threads, accept no more updates, and leave: with a `goodbye`, when the server has all."""
        with self._changed:
            self._shared.error = self._shared.error or ServerError("this trainer was closed: connect again")
            self._changed.notify_all()
            if self._goodbye is None:
                self._goodbye = goodbye
                self._queue.append(_BYE)
        self._bell.ring()

    def close(self, *, goodbye: bool) -> None:
        """Stop, and wait until the connection is closed. Later calls do nothing.

        Raises ServerError if the server may not have all that was logged, unless the reason has been told.
        """
        self.stop(goodbye=goodbye)
        self._thread.join()
        if self._goodbye and self._unconfirmed and self._shared.told is not self._shared.error:
            self._shared.told = self._shared.error
            raise ServerError(
                f"the server at {self._settings.address} has not confirmed the last {self._unconfirmed} updates, which "
                "may be lost: call settle before close, and pass reconnect= to wait for a server that is gone"
            ) from self._shared.error

    def check(self) -> None:
        """Raise the error that ended the channel, if any; in a forked child, whose threads are gone, there is one."""
        if not (self._shared.error or self._thread.is_alive()):
            raise ServerError("this trainer belongs to another process, which forked this one: connect anew")
        if self._shared.error is not None:
            self._shared.told = self._shared.error
            raise self._shared.error

    @property
    def _unconfirmed(self) -> int:
        """How many updates the server may not have taken in."""
        return 0 if self._left else max(0, next(reversed(self._log), 0) - self._answered)

    @property
    def _over(self) -> bool:
        """Whether this was closed, and after a BYE the server has all updates, or is gone and lacks none."""
        with self._changed:
            waits = self._goodbye and not self._left and (self._joined or self._unconfirmed)
            return self._goodbye is not None and not waits

    def _run(self) -> None:
        """Join, send what is due and take in answers; after a loss, again. `send` and `wait` raise what ends it."""
        try:
            while not self._over:
                try:
                    with ExitStack() as ending:
                        with self._shared.turn:
                            link = ending.enter_context(closing(self._called()))
                            self._join(link)
                        self._converse(link)
                except GoneError as error:
                    self._lost(error)
                finally:
                    self._shared.joined.discard(self._settings.index)
        except Exception as error:
            self._fail(error)

    def _called(self) -> Link:
        """Return a new connection. Raises ServerError, GoneError, or ValueError for what is no ticket."""
        its = self._settings
        key = ticket(its.ticket, its.address, its.index, seconds=its.timeout)
        talk = Talk(self.layout.told, self.counted)
        return Link(its.address, key, self._bell, talk, timeout=its.timeout, over=lambda: self._over)

    def _join(self, link: Link) -> None:
        with self._changed:
            sent = max(self.saved, next(reversed(self._log), 0))
        pace = (self._shared.ahead, sent, WINDOW * bool(self._shared.joined))
        asked = {"trainer": self._settings.trainer, "agreed": dict(self.layout.agreed), "pace": pace}
        link.send(Kind.JOIN, json.dumps(asked).encode())
        self._joined = False
        while not self._over and not self._joined:
            if (frame := link.receive()) is not None:
                self._take(frame)

    def _converse(self, link: Link) -> None:
        """Do what is to be done, until another server decides the pace anew. Raises GoneError."""
        while not self._over and self._ahead == self._shared.ahead:
            if (due := self._due()) is not None:
                version = min((due.base.version, *self._floors[due.base.joins :]))
                told = {"number": due.number, "version": version, "loss": due.loss, "flags": due.flags}
                link.send(due.kind, *due.body, **told)
            elif (frame := link.receive()) is not None:
                self._take(frame)

    def _due(self) -> Request | None:
        """Return what may be sent now, if anything may, and take it for sent."""
        with self._changed:
            if self._full:
                self._full = False
                return _SAVE
            self._sound |= not self._queue and not self._waiting
            waits = bool(self._queue) and self._queue[0].kind is not Kind.BYE
            if not self._queue or (waits and self._waiting == WINDOW):
                return None
            self._waiting += waits
            return self._queue.popleft()

    def _fail(self, error: Exception) -> None:
        with self._changed:
            said = ""
            if isinstance(error, (FrameError, PayloadError)):
                said = f"the server's answer cannot be read ({error}): do both run the same version of thinwire?"
            elif self._floors and not isinstance(error, (ServerError, FingerprintError)):
                said = f"the thread that listens to the server has failed: {type(error).__name__}: {error}"
            self._shared.error = ServerError(said) if said else error
            self._changed.notify_all()

    def _lost(self, error: GoneError) -> None:
        """Have the trainer join again, within the patience that each loss has of its own. Raises ServerError."""
        self._joined, where, patience = False, self._settings.address, self._settings.patience
        if self._sound and patience:
            logger.warning("no connection to the server at %s (%s); trying again for %g s", where, error, patience)
            self._sound, self._deadline = False, time.monotonic() + patience
        elif time.monotonic() < self._deadline:
            time.sleep(TICK)
        else:
            what = f"cannot join a server at {where}"
            fix = "start it first, with this version of thinwire, or pass reconnect=, in seconds, to wait for it"
            if self._floors:
                what = f"the server at {where} is gone, or closes the connection whenever this trainer joins"
                fix = "see its log, start it again from its checkpoint, and pass reconnect=, in seconds, to wait for it"
            raise ServerError(f"{what}: {error}" if error.fix else f"{what} ({error}): {fix}") from error

    def _take(self, frame: Frame) -> None:
        match frame.kind:
            case Kind.PING:
                pass
            case Kind.JOIN if not self._joined:
                self._welcomed(frame)
            case Kind.UPDATE if self._joined:
                if not frame.flags & Flag.BRIEF:
                    self.copy.take(frame.body, Base(frame.version, len(self._floors)), frame.number)
                self._answered, self.dropped = frame.number, self.dropped + bool(frame.flags & Flag.DROPPED)
            case Kind.FETCH:
                if (asked := self._open.get(frame.number)) is None:
                    raise FrameError(f"rows for request {frame.number}, which is not open")
                self.copy.fetched(asked[1], frame.body, frame.version)
                del self._open[frame.number]
            case Kind.END if frame.flags & Flag.FINAL:
                raise (ServerError if self._joined else FingerprintError)(f"{self._settings.address}: {frame.words}")
            case Kind.END:
                raise GoneError(frame.words)
            case Kind.BYE if self._goodbye:
                self._left = True
            case _:
                raise FrameError(f"the server sent {frame.kind.name} out of turn")
        with self._changed:
            if frame.kind in (Kind.UPDATE, Kind.FETCH):
                self._sound, self._waiting = True, self._waiting - 1
            while (first := next(iter(self._log), frame.saved + 1)) <= frame.saved:  # it is on disk
                self._logged -= sum(map(len, self._log.pop(first).body))
            self.saved = max(self.saved, frame.saved)
            self._changed.notify_all()

    def _welcomed(self, frame: Frame) -> None:
        """Take in all parameters, and have sent again what the server has not applied."""
        if frame.number < self.saved:
            raise ServerError(
                f"the server at {self._settings.address} has applied {frame.number} updates of this trainer, fewer "
                f"than the {self.saved} it had saved: start it from its checkpoint, or restart this trainer"
            )
        life, restored, self._ahead = LIFE.unpack_from(frame.body)
        self._shared.ahead = self._ahead
        self._shared.joined.add(self._settings.index)
        self.copy.take(frame.body[LIFE.size :], Base(frame.version, len(self._floors) + 1))
        floor = frame.version if life == self._life else restored  # to which the server went back
        self.copy.rejoined(floor)
        with self._changed:
            again = [each for number, each in self._log.items() if number > frame.number]
            again[:-1] = [each._replace(flags=each.flags | Flag.BRIEF) for each in again[:-1]]
            self._queue = deque(sorted([*again, *(question for question, _ in self._open.values())]))
            self._queue.extend([_BYE] * (self._goodbye is not None))
            self._life, self._answered, self._waiting, self._joined = life, frame.number, 0, True
            self._floors.append(floor)

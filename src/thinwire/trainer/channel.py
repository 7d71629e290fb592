"""One server, as a trainer sees it: a connection that may be made anew, and the updates that may yet be lost."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple, final

from torch import Tensor

from thinwire.errors import FingerprintError, PayloadError, ServerError
from thinwire.trainer.calling import Settings, called
from thinwire.trainer.copy import Base, Copy
from thinwire.trainer.fetched import Fetches, Rows
from thinwire.trainer.log import Log, Sent
from thinwire.wire.frames import ACKNOWLEDGED, LIFE, NONE, Bytes, Flag, Frame, FrameError, GoneError, Kind
from thinwire.wire.rows import question
from thinwire.wire.sockets import TICK, Bell, Link

logger = logging.getLogger("thinwire")
_WINDOW = 4
"""Updates that are with the server and not answered, at most; others wait here, so that they take no room there."""


class _Said(NamedTuple):
    """A frame to be sent."""

    kind: Kind
    body: Sequence[Bytes]
    number: int
    version: int
    flags: Flag


@final
class Channel:
    """Sends updates to one server, in order, and writes its answers into the trainer's `copy`.

    An update stays in the log until the server says that it is on disk. After a lost connection the channel joins again
    and goes on with the first that the server has not applied. Its own thread alone uses the connection.
    """

    def __init__(self, settings: Settings, copy: Copy, rows: Rows) -> None:
        self._settings, self.copy, self.rows = settings, copy, rows
        self._changed, self._fetches, self._bell = threading.Condition(), Fetches(), Bell()
        self._log, self._floors, self._life = Log(settings.log_bytes), list[int](), 0
        self._added = self._answered = self._durable = self.dropped = 0
        self._transmitted = self._done = self._repeated = 0  # over this connection; repeated: up to which again
        self._full = self._sound = self._goodbye = False
        self._closed = threading.Event()
        self._error: Exception | None = None
        self._counted = [0, 0]
        self._deadline = time.monotonic() + settings.patience
        try:
            with copy.open():
                self._link = self._joined()
        except BaseException:
            self._bell.close()
            raise
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def staged_bytes(self) -> int:
        """Bytes of the updates that may have to be sent once more."""
        with self._changed:
            return self._log.nbytes

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes sent and received, headers included."""
        ended, now = self._counted, self._link.counted
        return ended[0] + now[0], ended[1] + now[1]

    @property
    def saved(self) -> int:
        """The number of the latest update that the server has on disk; of one without a checkpoint, that it applied."""
        return self._durable

    def send(self, number: int, base: Base, flags: Flag, body: Sequence[Bytes]) -> None:
        """Log an update, to be sent. Waits while the log is full. Raises ServerError. One thread at a time."""
        size = sum(map(len, body))
        with self._changed:
            if not self._log.fits(size):
                self._full = True
                self._bell.ring()
            self._wait_for(lambda: self._log.fits(size))
            self._full = False
            flags |= Flag.SAVE if self._log.half_full(size) else NONE
            version = min((base.version, *self._floors[base.joins :]))
            self._log.add(Sent(number=number, version=version, flags=flags, body=body))
            self._added = number
        self._bell.ring()

    def wait(self, number: int) -> None:
        """Wait until update `number` is answered. Raises ServerError if it never will be."""
        with self._changed:
            self._changed.wait_for(lambda: self._error or self._answered >= number)
            if self._answered < number:
                self.check()

    def fetch(self, keys: Sequence[Tensor]) -> int:
        """Ask for these rows of each embedding, and return the question's number. Raises ServerError."""
        with self._changed:
            self.check()
            number = self._fetches.add(keys, after=self._added)
        self._bell.ring()
        return number

    def wait_for_rows(self, number: int) -> None:
        """Wait until question `number` is answered. Raises ServerError if it never will be."""
        with self._changed:
            self._changed.wait_for(lambda: self._error or number not in self._fetches)
            if number in self._fetches:
                self.check()

    def settle(self, seconds: float) -> bool:
        """Wait until nothing is logged, at most so long. Return whether it is so."""
        with self._changed:
            return self._changed.wait_for(lambda: self._error or not self._log, seconds) and not self._log

    def stop(self) -> None:
        """Wake all waiting threads, and accept no more updates."""
        with self._changed:
            self._error = self._error or ServerError("this trainer was closed: connect again")
            self._changed.notify_all()

    def close(self, *, goodbye: bool) -> None:
        """Close the connection, with or without a BYE, when all that was logged has been sent."""
        self.stop()
        self._goodbye = goodbye
        self._closed.set()
        self._bell.ring()
        self._thread.join()

    def check(self) -> None:
        """Raise the error that ended the channel, if any."""
        if self._error is not None:
            raise self._error

    def _wait_for(self, until: Callable[[], bool]) -> None:
        """Wait, with the lock held. Raises what has ended the channel."""
        self._changed.wait_for(lambda: self._error or until())
        self.check()

    def _run(self) -> None:
        """Send what is due and take in answers; after a loss, join again. `send` and `wait` raise what ends it."""
        try:
            while not self._over():
                try:
                    self._transmit()
                    if self._over():
                        return
                    if (frame := self._link.receive()) is not None:
                        self._take(frame)
                except GoneError as error:
                    if self._closed.is_set():
                        return
                    self._rejoin(error)
        except Exception as error:
            self._fail(error)
        finally:
            if self._goodbye:
                self._take_leave()
            self._link.close()
            self._bell.close()

    def _take_leave(self) -> None:
        """Say BYE, and wait for the END that shows that all has arrived."""
        with suppress(GoneError, ServerError, FrameError):
            self._link.send(Kind.BYE)
            while (frame := self._link.receive()) is None or frame.kind is not Kind.END:
                pass

    def _over(self) -> bool:
        """Whether this was closed, and all has been sent before a BYE."""
        with self._changed:
            return self._closed.is_set() and not (self._goodbye and self._log.after(self._transmitted))

    def _transmit(self) -> None:
        """Send all that is due. Raises GoneError."""
        while not self._over():
            with self._changed:
                said = self._due()
            if said is None:
                return
            self._link.send(said.kind, *said.body, number=said.number, version=said.version, flags=said.flags)

    def _due(self) -> _Said | None:
        """Return what is to be sent next, if anything is."""
        question_ = self._fetches.due(self._transmitted)
        if question_ is not None:
            return _Said(Kind.FETCH, question(self.rows.layout, self._fetches.keys(question_)), question_, 0, NONE)
        open_ = self._closed.is_set() or self._transmitted - self._done < _WINDOW
        if open_ and (rest := self._log.after(self._transmitted)) is not None:
            self._transmitted = rest.number
            brief = rest.number <= self._repeated and self._log.after(rest.number) is not None
            return _Said(
                Kind.UPDATE, rest.body, rest.number, rest.version, rest.flags | (Flag.BRIEF if brief else NONE)
            )
        if self._full:
            self._full = False
            return _Said(Kind.PING, (), 0, 0, Flag.SAVE)
        self._sound |= self._log.after(self._done) is None and not self._fetches
        return None

    def _fail(self, error: Exception) -> None:
        with self._changed:
            if not self._closed.is_set():
                self._error = error
                if isinstance(error, (FrameError, PayloadError)):
                    said = f"the server's answer cannot be read ({error}): do both run the same version of thinwire?"
                    self._error = ServerError(said)
                elif not isinstance(error, (ServerError, FingerprintError)):
                    said = f"the thread that listens to the server has failed: {type(error).__name__}: {error}"
                    self._error = ServerError(said)
            self._changed.notify_all()

    def _rejoin(self, error: GoneError) -> None:
        """Join again, within the patience that each loss has of its own."""
        self._counted, self._link.counted = list(self.traffic), [0, 0]
        self._link.close()
        where, patience = self._settings.address, self._settings.patience
        if not patience:
            raise ServerError(
                f"the server at {where} is gone ({error}): start it again from its checkpoint, and pass reconnect=, "
                "in seconds, so that trainers wait for it"
            ) from error
        if self._sound:
            logger.warning("lost the server at %s (%s); reconnecting", where, error)
            self._deadline = time.monotonic() + patience
        elif time.monotonic() > self._deadline or self._closed.wait(TICK):
            raise ServerError(
                f"the server at {where} closes the connection whenever this trainer joins ({error}): see its log"
            ) from error
        self._link = self._joined()

    def _joined(self) -> Link:
        """Return a connection that has joined, with the server's parameters taken over."""
        self._sound = False
        link, welcome = called(self._settings, self._bell, self._deadline, self._closed)
        try:
            self._welcomed(welcome)
        except BaseException:
            link.close()
            raise
        return link

    def _welcomed(self, frame: Frame) -> None:
        applied, durable = ACKNOWLEDGED.unpack_from(frame.body)
        if applied < self._durable:
            raise ServerError(
                f"the server at {self._settings.address} has applied {applied} updates of this trainer, fewer than "
                f"the {self._durable} it had saved: start it from its checkpoint, or restart this trainer"
            )
        life, restored = LIFE.unpack_from(frame.body, ACKNOWLEDGED.size)
        joins = len(self._floors) + 1
        self.copy.take(frame.body[ACKNOWLEDGED.size + LIFE.size :], 0, Base(frame.version, joins), whole=True)
        floor = frame.version if life == self._life else restored  # to which the server went back
        self.rows.rejoined(floor)
        with self._changed:
            self._life, self._repeated = life, self._added
            self._transmitted = self._done = applied
            self._answered = max(self._answered, applied)
            self._fetches.repeat()
            self._floors.append(floor)
            self._log.clamp(floor)
            self._forget(durable)

    def _take(self, frame: Frame) -> None:
        if frame.kind is Kind.PARAMETERS:
            applied, durable = ACKNOWLEDGED.unpack_from(frame.body)
            if not frame.flags & Flag.BRIEF:
                base = Base(frame.version, len(self._floors))
                self.copy.take(frame.body[ACKNOWLEDGED.size :], frame.number, base, whole=False)
            with self._changed:
                self._done, self._sound = max(self._done, frame.number), True
                self._answered = max(self._answered, min(applied, frame.number))
                self.dropped += bool(frame.flags & Flag.DROPPED)
                self._forget(durable)
        elif frame.kind is Kind.PING:
            with self._changed:
                self._forget(frame.number)
        elif frame.kind is Kind.ROWS:
            self.rows.take(self._fetches.keys(frame.number), frame.body, frame.version)
            with self._changed:
                self._sound = True
                self._fetches.done(frame.number)
                self._changed.notify_all()
        elif frame.kind in (Kind.REFUSED, Kind.END):
            said = bytes(frame.body).decode(errors="replace")
            raise (ServerError(f"{self._settings.address}: {said}") if frame.kind is Kind.REFUSED else GoneError(said))
        else:
            raise FrameError(f"the server sent {frame.kind.name} out of turn")

    def _forget(self, durable: int) -> None:
        self._durable = max(self._durable, durable)
        self._log.forget(durable)
        self._changed.notify_all()

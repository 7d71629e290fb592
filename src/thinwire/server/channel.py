"""One server, as a trainer sees it: a connection that may be made anew, and the updates that may yet be lost."""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import final

from torch import Tensor

from thinwire.errors import FingerprintError, PayloadError, ServerError
from thinwire.server.calling import PAUSE, Settings, called
from thinwire.server.exchange import Base, Copy
from thinwire.server.fetching import Fetches, Rows, question
from thinwire.server.frames import NONE, Flag, Frame, FrameError, GoneError, Kind, Wire
from thinwire.server.layout import Bytes
from thinwire.server.log import Log, Sent
from thinwire.server.session import ACKNOWLEDGED, LIFE

logger = logging.getLogger("thinwire")


@final
class Channel:
    """Sends updates to one server, in order, and writes its answers into the trainer's `copy`.

    An update stays in the log until the server says that it is on disk. After a lost connection the channel joins again
    and sends, one at a time, those that the server has not applied; until then no thread adds to them.
    """

    def __init__(self, settings: Settings, copy: Copy, rows: Rows) -> None:
        self._settings, self.copy, self.rows = settings, copy, rows
        self._changed, self._fetches = threading.Condition(), Fetches()
        self._log, self._floors, self._life = Log(settings.log_bytes), list[int](), 0
        self._sent = self._answered = self._durable = self.dropped = 0
        self._direct, self._closed = False, threading.Event()
        self._error: Exception | None = None
        self._counted = [0, 0]
        with copy.open():
            self._wire = self._joined(time.monotonic() + settings.patience)
            self._catch_up()
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    @property
    def staged_bytes(self) -> int:
        """Bytes of the updates that may have to be sent once more."""
        with self._changed:
            return self._log.nbytes

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes sent and received, headers included."""
        return self._counted[0] + self._wire.sent, self._counted[1] + self._wire.received

    @property
    def saved(self) -> int:
        """The number of the latest update that the server has on disk; of one without a checkpoint, that it applied."""
        return self._durable

    def send(self, number: int, base: Base, flags: Flag, body: Sequence[Bytes]) -> None:
        """Log an update and send it. Waits while the log is full. Raises ServerError. One thread at a time."""
        size = sum(map(len, body))
        self._make_room(size)
        with self._changed:
            self._wait_for(lambda: self._direct)
            flags |= Flag.SAVE if self._log.half_full(size) else Flag(0)
            version = min((base.version, *self._floors[base.joins :]))
            update = Sent(number=number, version=version, flags=flags, body=body)
            self._log.add(update)
            wire = self._wire
        with _closing_if_gone(wire):
            update.transmit(wire)

    def _make_room(self, size: int) -> None:
        """Ask the server to save for as long as there is no room in the log for so many bytes."""
        while True:
            with self._changed:
                self._wait_for(lambda: self._direct)
                if self._log.fits(size):
                    return
                wire = self._wire
            with _closing_if_gone(wire):
                wire.send(Kind.PING, flags=Flag.SAVE)
            with self._changed:
                self._wait_for(lambda: self._log.fits(size) or not self._direct)

    def wait(self, number: int) -> None:
        """Wait until update `number` is answered. Raises ServerError if it never will be."""
        with self._changed:
            self._changed.wait_for(lambda: self._error or self._answered >= number)
            if self._answered < number:
                self.check()

    def fetch(self, keys: Sequence[Tensor]) -> int:
        """Ask for these rows of each embedding, and return the question's number. Raises ServerError."""
        body = question(self.rows.layout, keys)
        with self._changed:
            self._wait_for(lambda: self._direct)
            number = self._fetches.add(keys)
            wire = self._wire
        with _closing_if_gone(wire):
            wire.send(Kind.FETCH, *body, number=number)
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
        self._closed.set()
        with self._changed:
            self._error = self._error or ServerError("this trainer was closed: connect again")
            self._changed.notify_all()

    def close(self, *, goodbye: bool) -> None:
        """Close the connection, with or without a BYE."""
        self.stop()
        if goodbye:
            with suppress(GoneError):
                self._wire.send(Kind.BYE)
        self._wire.close()
        self._thread.join(self._settings.timeout)

    def check(self) -> None:
        """Raise the error that ended the channel, if any."""
        if self._error is not None:
            raise self._error

    def _wait_for(self, until: Callable[[], bool]) -> None:
        """Wait, with the lock held. Raises what has ended the channel."""
        self._changed.wait_for(lambda: self._error or until())
        self.check()

    def _listen(self) -> None:
        """Take in answers; after a loss, join again. What ends it is raised by `send` and `wait`."""
        try:
            while not self._closed.is_set():
                try:
                    self._take(self._wire.receive())
                except GoneError as error:
                    if self._closed.is_set():
                        return
                    self._rejoin(error)
        except Exception as error:
            self._fail(error)
        finally:
            self._wire.close()

    def _fail(self, error: Exception) -> None:
        with self._changed:
            if not self._closed.is_set():
                self._error = error
                if isinstance(error, (FrameError, PayloadError)):
                    said = f"the server's answer cannot be read ({error}): are both of the same version of thinwire?"
                    self._error = ServerError(said)
                elif not isinstance(error, (ServerError, FingerprintError)):
                    said = f"what listens to the server has failed: {type(error).__name__}: {error}"
                    self._error = ServerError(said)
            self._changed.notify_all()

    def _rejoin(self, error: GoneError) -> None:
        self._end_connection()
        where = self._settings.address
        if not self._settings.patience:
            raise ServerError(
                f"the server at {where} is gone ({error}): start it again from its checkpoint, and pass reconnect=, "
                "in seconds, so that trainers wait for it"
            ) from error
        logger.warning("lost the server at %s (%s); reconnecting", where, error)
        deadline = time.monotonic() + self._settings.patience
        while True:
            self._wire = self._joined(deadline)
            before = self._sent
            try:
                self._catch_up()
                return
            except GoneError as gone:
                self._end_connection()
                if self._sent > before:  # that was another loss
                    deadline = time.monotonic() + self._settings.patience
                if time.monotonic() > deadline or self._closed.wait(PAUSE):
                    raise ServerError(
                        f"the server at {where} closes the connection whenever this trainer joins ({gone}): see its log"
                    ) from gone

    def _end_connection(self) -> None:
        with self._changed:
            self._direct = False
        self._wire.close()
        self._counted[0] += self._wire.sent
        self._counted[1] += self._wire.received
        self._wire.sent = self._wire.received = 0

    def _joined(self, deadline: float) -> Wire:
        """Return a connection that has joined, with the server's parameters taken over."""
        wire, welcome = called(self._settings, deadline, self._closed)
        try:
            self._welcomed(welcome)
        except BaseException:
            wire.close()
            raise
        return wire

    def _welcomed(self, frame: Frame) -> None:
        applied, durable = ACKNOWLEDGED.unpack_from(frame.body)
        if applied < self._durable:
            raise ServerError(
                f"the server at {self._settings.address} has applied {applied} updates of this trainer, and had saved "
                f"{self._durable}: start it from its checkpoint, or restart this trainer"
            )
        life, restored = LIFE.unpack_from(frame.body, ACKNOWLEDGED.size)
        joins = len(self._floors) + 1
        self.copy.take(frame.body[ACKNOWLEDGED.size + LIFE.size :], 0, Base(frame.version, joins), whole=True)
        floor = frame.version if life == self._life else restored  # to which the server went back
        self.rows.rejoined(floor)
        with self._changed:
            self._life, self._sent = life, applied
            self._floors.append(floor)
            self._log.clamp(floor)
            self._forget(durable)

    def _catch_up(self) -> None:
        """Send what the server has not applied and not answered, one after the other. Raises GoneError."""
        while True:
            with self._changed:
                rest = self._log.after(self._sent)
                self._answered = max(self._answered, self._sent)
                self._changed.notify_all()
                if rest is None and not self._fetches:
                    self._direct = True
                    return
            if rest is not None:
                rest.transmit(self._wire, Flag.BRIEF if self._log.after(rest.number) else NONE)
                while self._sent < rest.number:
                    self._take(self._wire.receive())
            else:  # ask the oldest open question once more
                number = self._fetches.oldest
                body = question(self.rows.layout, self._fetches.keys(number))
                self._wire.send(Kind.FETCH, *body, number=number)
                while number in self._fetches:
                    self._take(self._wire.receive())

    def _take(self, frame: Frame) -> None:
        if frame.kind is Kind.PARAMETERS:
            applied, durable = ACKNOWLEDGED.unpack_from(frame.body)
            if not frame.flags & Flag.BRIEF:
                base = Base(frame.version, len(self._floors))
                self.copy.take(frame.body[ACKNOWLEDGED.size :], frame.number, base, whole=False)
            with self._changed:
                self._sent = max(self._sent, frame.number)
                self._answered = max(self._answered, min(applied, frame.number))
                self.dropped += bool(frame.flags & Flag.DROPPED)
                self._forget(durable)
        elif frame.kind is Kind.PING:
            with self._changed:
                self._forget(frame.number)
        elif frame.kind is Kind.ROWS:
            self.rows.take(self._fetches.keys(frame.number), frame.body, frame.version)
            with self._changed:
                self._fetches.done(frame.number)
                self._changed.notify_all()
        elif frame.kind is Kind.REFUSED:
            raise ServerError(f"{self._settings.address}: {bytes(frame.body).decode(errors='replace')}")
        else:
            raise FrameError(f"the server sent {frame.kind.name} out of turn")

    def _forget(self, durable: int) -> None:
        self._durable = max(self._durable, durable)
        self._log.forget(durable)
        self._changed.notify_all()


@contextmanager
def _closing_if_gone(wire: Wire) -> Iterator[None]:
    """Close a connection over which nothing can be sent: the listening thread will join again and send it."""
    try:
        yield
    except GoneError:
        wire.close()

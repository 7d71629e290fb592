"""One server, as a trainer sees it: a connection that may be made anew, and the updates that may yet be lost."""

import logging
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import final

from torch import Tensor

from thinwire.errors import FingerprintError, PayloadError, ServerError
from thinwire.server.asking import Fetches, Rows, ask
from thinwire.server.calling import PAUSE, Settings, called
from thinwire.server.exchange import Copy
from thinwire.server.fetching import question
from thinwire.server.frames import Flag, Frame, FrameError, GoneError, Kind, Wire
from thinwire.server.layout import Bytes
from thinwire.server.session import ACKNOWLEDGED

logger = logging.getLogger("thinwire")


@final
@dataclass(frozen=True, kw_only=True)
class _Sent:
    number: int
    version: int
    flags: Flag
    body: Sequence[Bytes]

    @property
    def nbytes(self) -> int:
        return sum(map(len, self.body))


@final
class Channel:
    """Sends updates to one server, in order, and writes its answers into the trainer's `copy`.

    An update stays in the log until the server says that it is on disk. After a loss the channel joins again and sends,
    one at a time, those that the server has not applied. Raises FingerprintError if the two do not train the same, and
    ServerError if the server cannot be had.
    """

    def __init__(self, settings: Settings, copy: Copy, rows: Rows) -> None:
        self._settings, self._copy, self.rows = settings, copy, rows
        self._changed, self._fetches = threading.Condition(), Fetches()
        self._log: deque[_Sent] = deque()
        self._logged = self._sent = self._answered = self._version = self._durable = self.dropped = 0
        self._direct, self._closed = False, threading.Event()
        self._error: Exception | None = None
        self._counted = [0, 0]
        self._wire = self._joined(time.monotonic() + settings.patience)
        self._catch_up()
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    @property
    def staged_bytes(self) -> int:
        """Bytes of the updates that may have to be sent once more."""
        with self._changed:
            return self._logged

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes sent and received, headers included."""
        return self._counted[0] + self._wire.sent, self._counted[1] + self._wire.received

    @property
    def version(self) -> int:
        """The version of the parameters that the trainer has."""
        return self._version

    @property
    def saved(self) -> int:
        """The number of the latest update that the server has on disk; of one without a checkpoint, that it applied."""
        return self._durable

    def send(self, number: int, version: int, flags: Flag, body: Sequence[Bytes]) -> None:
        """Log an update and send it. Waits while the log is full. Raises ServerError. One thread at a time."""
        with self._changed:
            self._check()
            size = sum(map(len, body))
            room = self._settings.log_bytes
            if self._logged + size > room // 2:
                flags |= Flag.SAVE
            self._changed.wait_for(lambda: self._error or not self._log or self._logged + size <= room)
            self._check()
            update = _Sent(number=number, version=version, flags=flags, body=body)
            self._log.append(update)
            self._logged += size
            wire, direct = self._wire, self._direct
        if direct:
            with _closing_if_gone(wire):
                _transmit(wire, update)

    def wait(self, number: int) -> None:
        """Wait until update `number` is answered. Raises ServerError if it never will be."""
        with self._changed:
            self._changed.wait_for(lambda: self._error or self._answered >= number)
            if self._answered < number:
                self._check()

    def fetch(self, keys: Sequence[Tensor]) -> int:
        """Ask for these rows of each embedding, and return the question's number. Raises ServerError."""
        body = question(self.rows.layout, keys)
        with self._changed:
            self._check()
            number = self._fetches.add(keys)
            wire, direct = self._wire, self._direct
        if direct:
            with _closing_if_gone(wire):
                ask(wire, number, body)
        return number

    def wait_for_rows(self, number: int) -> None:
        """Wait until question `number` is answered. Raises ServerError if it never will be."""
        with self._changed:
            self._changed.wait_for(lambda: self._error or number not in self._fetches)
            if number in self._fetches:
                self._check()

    def settle(self, seconds: float) -> bool:
        """Wait until nothing is logged, at most so long. Return whether it is so."""
        with self._changed:
            return self._changed.wait_for(lambda: self._error or not self._log, seconds) and not self._log

    def stop(self) -> None:
        """Let everyone go who waits, and take no more."""
        self._closed.set()
        with self._changed:
            self._error = self._error or ServerError("this trainer was closed: connect again")
            self._changed.notify_all()

    def close(self, *, goodbye: bool) -> None:
        """Hang up, with a goodbye or without."""
        self.stop()
        if goodbye:
            with suppress(GoneError):
                self._wire.send(Kind.BYE)
        self._wire.close()
        self._thread.join(self._settings.timeout)

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

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
                self._error = error if isinstance(error, (ServerError, FingerprintError)) else _broken(error)
            self._changed.notify_all()

    def _rejoin(self, error: GoneError) -> None:
        self._end_connection()
        where = self._settings.address
        if not self._settings.patience:
            raise ServerError(
                f"the server at {where} is gone ({error}): start it again from its checkpoint, and pass reconnect=, "
                "in seconds, so that trainers wait for it"
            ) from error
        logger.warning("the server at %s is gone (%s); looking for it", where, error)
        deadline = time.monotonic() + self._settings.patience
        while True:
            self._wire = self._joined(deadline)
            try:
                self._catch_up()
                return
            except GoneError as gone:
                self._end_connection()
                if time.monotonic() > deadline or self._closed.wait(PAUSE):
                    raise ServerError(
                        f"the server at {where} hangs up whenever this trainer has joined ({gone}): its log says why"
                    ) from gone

    def _end_connection(self) -> None:
        """Let nobody send over it any more, and add up what went over it."""
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
                f"{self._durable}: start it from its checkpoint, or this trainer anew"
            )
        self._copy.take(frame.body[ACKNOWLEDGED.size :], 0, whole=True)
        self.rows.rejoined(frame.version)
        with self._changed:
            self._version, self._sent = frame.version, applied
            self._forget(durable)

    def _catch_up(self) -> None:
        """Send what the server has not applied and not answered, one after the other. Raises GoneError."""
        while True:
            with self._changed:
                rest = [each for each in self._log if each.number > self._sent]
                self._answered = max(self._answered, self._sent)
                self._changed.notify_all()
                if not rest and not self._fetches:
                    self._direct = True
                    return
            if rest:
                _transmit(self._wire, rest[0])
                while self._sent < rest[0].number:
                    self._take(self._wire.receive())
            else:
                self._ask_again()

    def _ask_again(self) -> None:
        """Ask the oldest open question once more, and take in its answer. Raises GoneError."""
        number = self._fetches.oldest
        ask(self._wire, number, question(self.rows.layout, self._fetches.keys(number)))
        while number in self._fetches:
            self._take(self._wire.receive())

    def _take(self, frame: Frame) -> None:
        if frame.kind is Kind.PARAMETERS:
            applied, durable = ACKNOWLEDGED.unpack_from(frame.body)
            self._copy.take(frame.body[ACKNOWLEDGED.size :], frame.number, whole=False)
            with self._changed:
                self._version = frame.version
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
        while self._log and self._log[0].number <= durable:
            self._logged -= self._log.popleft().nbytes
        self._changed.notify_all()


@contextmanager
def _closing_if_gone(wire: Wire) -> Iterator[None]:
    """Close a connection over which nothing can be sent: the listening thread will join again and send it."""
    try:
        yield
    except GoneError:
        wire.close()


def _transmit(wire: Wire, update: _Sent) -> None:
    wire.send(Kind.UPDATE, *update.body, number=update.number, version=update.version, flags=update.flags)


def _broken(error: Exception) -> ServerError:
    if isinstance(error, (FrameError, PayloadError)):
        return ServerError(f"the server's answer cannot be read ({error}): are both of the same version of thinwire?")
    return ServerError(f"what listens to the server has failed: {type(error).__name__}: {error}")

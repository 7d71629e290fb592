"""The parameter server at work: what is done now and then, its status, and its end."""

import logging
import math
import socket
import threading
import time
from typing import Self, final

from thinwire.server.door import Door
from thinwire.server.frames import SHORTEST
from thinwire.server.session import Session, Shared
from thinwire.server.status import ServerStatus

logger = logging.getLogger("thinwire")


@final
class Server:
    """A running parameter server, which `serve` makes: use it as a context manager, or call `close`."""

    def __init__(self, shared: Shared, listener: socket.socket, *, address: str, every: float) -> None:
        self._shared, self._address, self._every = shared, address, every
        self._door = Door(listener, shared)
        self._closing = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Start accepting trainers, and saving. `serve` has done so."""
        for job in (self._door.accept, self._keep_saving, self._keep_pinging):
            self._threads.append(threading.Thread(target=job, daemon=True))
            self._threads[-1].start()

    @property
    def address(self) -> str:
        """Where it listens, as host:port."""
        return self._address

    def status(self) -> ServerStatus:
        """Return how far it is now."""
        with self._shared.lock:
            return self._shared.status()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until as many trainers as expected have joined, and all have left, and return whether that is so.

        One that left without a BYE has `timeout` seconds to come back, and if nothing has been trained, all the time it
        needs; after a restart from a checkpoint, all have `timeout` seconds.

        Raises:
            ServerError: If an optimizer or scheduler has raised: nothing is applied or saved any more.
        """
        end = time.monotonic() + (math.inf if seconds is None else seconds)
        with self._shared.lock:
            while not (done := self._all_left()) and time.monotonic() < end:
                self._shared.central.check()
                self._shared.lock.wait(min(0.5, max(0.0, end - time.monotonic())))
            self._shared.central.check()
        return done

    def save(self) -> None:
        """Save now. Raises ValueError without a checkpoint, and OSError where the disk refuses."""
        self._shared.saving.save()
        self._door.tell(lambda session: session.wire.ping())  # with what is on disk now

    def close(self) -> None:
        """Stop: close all connections, and save if there is a checkpoint."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._shared.saving.soon.set()
        self._door.close()
        with self._shared.lock:
            self._shared.rule.stop()
        for each in self._threads:
            each.join(self._shared.timeout)
        self._door.join(self._shared.timeout)
        if self._shared.saving.durable is not None and not self._shared.central.failure:
            self.save()
        self._shared.central.places.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _all_left(self) -> bool:
        away = time.monotonic() - self._shared.lost
        rule, sessions = self._shared.rule, self._shared.sessions
        trained = bool(rule.goodbyes or self._shared.central.applied)
        return rule.complete and trained and not sessions and away > self._shared.timeout

    def _keep_pinging(self) -> None:
        """Let trainers know that the server is there, whatever their sessions wait for or compute; and if it fails."""
        while not self._closing.wait(min(self._shared.timeout, SHORTEST) / 4):
            self._door.tell(Session.ping_if_due)

    def _keep_saving(self) -> None:
        saving = self._shared.saving
        while not self._closing.is_set():
            saving.soon.wait(self._every)
            saving.soon.clear()
            if saving.durable is None or self._closing.is_set() or self._shared.central.failure:
                continue
            try:
                self.save()
            except OSError as error:
                logger.error("the checkpoint could not be saved: %s. Trainers keep their updates", error)
                self._closing.wait(1.0)

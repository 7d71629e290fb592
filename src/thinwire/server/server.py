"""The parameter server at work: what is done now and then, its status, and its end."""

import logging
import math
import threading
import time
from collections.abc import Callable
from typing import Self, final

from thinwire.server.hub import Hub
from thinwire.server.session import Shared
from thinwire.server.status import ServerStatus
from thinwire.wire.sockets import Listener

logger = logging.getLogger("thinwire")


@final
class Server:
    """A running parameter server, which `serve` makes: use it as a context manager, or call `close`."""

    def __init__(
        self, shared: Shared, listener: Listener, *, ticket: str, every: float, closed: Callable[[], None]
    ) -> None:
        self.address = listener.address
        """Where it listens, as host:port."""
        self.ticket = ticket
        """What lets a trainer join: `connect(..., ticket=)`. Whoever has it can join, so keep it secret."""
        self._shared, self._every = shared, every
        self._hub, self._on_close, self._closing = Hub(listener, shared), closed, threading.Event()
        self._threads = [threading.Thread(target=job, daemon=True) for job in (self._hub.run, self._keep_saving)]
        for each in self._threads:
            each.start()

    def status(self) -> ServerStatus:
        """Return its status now."""
        with self._shared.lock:
            return self._shared.status()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until as many trainers as expected have joined and all have left.

        A trainer that vanished without calling `close` has `timeout` seconds to come back (no limit before the first
        update). After a restart from a checkpoint, all trainers have `timeout` seconds.

        Args:
            seconds: How long to wait at most; by default without limit.

        Returns:
            Whether they have.

        Raises:
            ServerError: If an optimizer or scheduler has raised: no further updates are applied or saved.
        """
        end = time.monotonic() + (math.inf if seconds is None else seconds)
        with self._shared.lock:
            while not (done := self._shared.rule.ended) and time.monotonic() < end:
                self._shared.central.check()
                self._shared.lock.wait(min(0.5, max(0.0, end - time.monotonic())))
            self._shared.central.check()
        return done

    def save(self) -> None:
        """Save now. Raises ValueError without a checkpoint, and OSError if it cannot be written."""
        self._shared.saving.save()
        self._hub.tell()

    def close(self) -> None:
        """Stop: close all connections, and save if there is a checkpoint."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._shared.saving.soon.set()
        self._hub.close()
        for each in self._threads:
            each.join()
        if self._shared.saving.durable is not None and not self._shared.central.failure:
            self.save()
        self._shared.central.places.release()
        self._on_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

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

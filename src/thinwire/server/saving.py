"""When a server's checkpoint is written, and what is in it."""

import threading
from typing import final

from thinwire.server.central import Central
from thinwire.server.durable import Durable


@final
class Saving:
    """Saves the central copy, and knows what has been saved; `soon` is set to ask for a checkpoint soon."""

    def __init__(self, central: Central, lock: threading.Condition, durable: Durable | None) -> None:
        self._central, self._lock, self.durable = central, lock, durable
        self._saved, self._version = dict(central.applied), central.version
        self._writing = threading.Lock()  # a state is never replaced by an older one
        self.soon = threading.Event()

    def latest(self, trainer: str) -> int:
        """Return a trainer's latest update that will outlive the server; without a checkpoint, none has to."""
        held = self._central.applied if self.durable is None else self._saved
        return held.get(trainer, 0)

    def save(self) -> None:
        """Save now; ValueError without a checkpoint, OSError of the disk, and ServerError after a step that failed."""
        if self.durable is None:
            raise ValueError("this server has no checkpoint: pass checkpoint= to serve")
        with self._writing:
            with self._lock:
                self._central.check()
                state = self._central.state()
            self.durable.save(
                state, keep=self._central.sound >= self._version
            )  # gradients were finite on what is there
            with self._lock:
                self._saved, self._version = state["applied"], state["version"]

"""What a worker has put on the wire."""

import time
from collections.abc import Callable
from dataclasses import dataclass

Wire = Callable[[], tuple[int, int] | None]
"""Bytes and packets sent so far on this worker's interface, or None where they cannot be told."""

_QUIET, _LONGEST_DRAIN = 0.02, 100  # seconds, readings


@dataclass
class Meter:
    """What this worker has put on the wire: bytes as counted, or as declared where the wire cannot be read."""

    wire: Wire
    total: float = 0.0
    _last: tuple[int, int] | None = None

    def skip(self) -> None:
        """Leave out what has travelled since the last reading."""
        self._last = self._at_rest()

    def read(self, declared: float) -> dict[str, int]:
        """Add what has travelled since the last reading, and return its bytes and packets if they were counted."""
        last, self._last = self._last, self.wire()
        if last is None or self._last is None:
            self.total += declared
            return {}
        nbytes, packets = self._last[0] - last[0], self._last[1] - last[1]
        self.total += nbytes
        return {"measured": nbytes, "packets": packets}

    def drain(self) -> dict[str, int]:
        """Wait until nothing more leaves, and return what has left since the last reading: the end of a step's bytes.

        A collective is over for a rank that has all it needs, while what it sent may still queue.
        """
        self._at_rest()
        return self.read(0.0)

    def _at_rest(self) -> tuple[int, int] | None:
        before, now = None, self.wire()
        for _ in range(_LONGEST_DRAIN):
            if now == before:
                break
            time.sleep(_QUIET)
            before, now = now, self.wire()
        return now

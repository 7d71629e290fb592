"""A clock of the seconds in which this process runs, so that none in which it was stopped decide anything."""

import threading
import time
from typing import final

_MOST = 4.0  # seconds between two looks at it: whoever waits looks more often, even if a store does not answer


@final
class _Clock:
    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._passed = self._last = time.monotonic()

    def monotonic(self) -> float:
        """Return the seconds since some moment, of which those between two calls count as `_MOST` at most."""
        with self._turn:
            before, self._last = self._last, time.monotonic()
            self._passed += min(self._last - before, _MOST)
            return self._passed


monotonic = _Clock().monotonic

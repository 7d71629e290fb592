"""A clock of the seconds in which this process runs, so that none in which it was stopped decide anything."""

import threading
import time

_MOST = 4.0  # seconds between two looks at it: whoever waits looks more often, even if a store does not answer
_TURN, _seen = threading.Lock(), [time.monotonic()] * 2


def monotonic() -> float:
    """Return the seconds since some moment, of which those between two calls count as `_MOST` at most."""
    with _TURN:
        passed, last = _seen
        now = time.monotonic()
        _seen[:] = passed + min(abs(now - last), _MOST), now
        return _seen[0]

"""An orderly exit: before the interpreter ends, the threads of collectives let go of Python's objects.

A collective delivers its result first, and lets go of callbacks, of what they returned and of its tensors a moment
later, in a thread of its own. Each of these takes the interpreter's lock. Before Python 3.14, a thread that asks for
the lock while the interpreter ends is made to exit, and with C++ on its stack that aborts the process: "terminate
called without an active exception", after a training that went well.
"""

import atexit
import os
import time
import weakref
from functools import cache

from torch import Tensor

_PATIENCE = 3.0  # seconds that an exit waits at most: what takes longer has lost its peers
_MOMENT = 0.01

_lent: weakref.WeakSet[Tensor] = weakref.WeakSet()


def lend(x: Tensor) -> Tensor:
    """Return an alias of `x` to hand to a collective, and to nobody else.

    It dies when the collective lets go of it, which is the last thing that its thread does.
    """
    alias = x.detach()
    _lent.add(alias)
    return alias


@cache
def patience_ends() -> float:
    """Return until when an exit may wait, in `time.monotonic` seconds; the first to ask starts the clock."""
    return time.monotonic() + _PATIENCE


@atexit.register
def _settle() -> None:
    """Wait until all that was lent is back, and a moment for collectives that others started."""
    while _lent and time.monotonic() < patience_ends():
        time.sleep(0.001)  # lets go of the lock
    time.sleep(_MOMENT)


# The threads that would let go are not in a forked child.
os.register_at_fork(after_in_child=_lent.clear)

"""An orderly exit: wait until the threads of collectives have released their Python objects.

Why wait? A collective first delivers its result. A moment later, in a thread of its own, it releases its callbacks,
their results and its tensors, and each release takes the interpreter's lock. Before Python 3.14, a thread that asks for
the lock while the interpreter ends is made to exit. With C++ on its stack, that aborts the process: "terminate called
without an active exception", after a training run that went well.
"""

import atexit
import os
import time
import weakref
from functools import cache

from torch import Tensor

_PATIENCE = 3.0  # seconds that an exit waits at most; a collective that takes longer has lost its peers
_MOMENT = 0.01

_lent: weakref.WeakSet[Tensor] = weakref.WeakSet()


def lend(x: Tensor) -> Tensor:
    """Return an alias of `x` for a collective and nobody else: it is freed when the collective is really over."""
    alias = x.detach()
    _lent.add(alias)
    return alias


@cache
def patience_ends() -> float:
    """Return when an exit stops waiting, in `time.monotonic` seconds. The first call starts the clock."""
    return time.monotonic() + _PATIENCE


@atexit.register
def _settle() -> None:
    """Wait until collectives have released every alias, then a moment more for collectives that others started."""
    while _lent and time.monotonic() < patience_ends():
        time.sleep(0.001)  # releases the lock
    time.sleep(_MOMENT)


# A forked child lacks the threads that would release the aliases.
os.register_at_fork(after_in_child=_lent.clear)

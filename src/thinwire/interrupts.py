"""^C may come between any two lines; what must not be torn puts it off."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def untorn() -> Iterator[None]:
    """Put ^C off until the block has ended. Python interrupts only the main thread, so it changes nothing in others."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    came = list[tuple[int, FrameType | None]]()
    signal.signal(signal.SIGINT, lambda *what: came.append(what))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if came:
            handler(*came[0])

"""Where the time and the bytes of a step go. It costs next to nothing unless a listener is registered."""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from torch import Tensor


@runtime_checkable
class Listener(Protocol):
    """Takes in what happens. It may be told from any thread."""

    def took(self, name: str, start: float, end: float) -> None:
        """Take in a span, in `time.perf_counter` seconds."""

    def add(self, name: str, amount: float | Tensor) -> None:
        """Take in an amount. A tensor, 0-dim, is read when it is wanted, so that a GPU need not be waited for."""


@dataclass
class Recorder:
    """What was recorded: spans as (name, start, end) in `time.perf_counter` seconds, and totals by name."""

    spans: list[tuple[str, float, float]] = field(default_factory=list)
    totals: dict[str, float] = field(default_factory=dict)

    def took(self, name: str, start: float, end: float) -> None:
        """Keep the span."""
        self.spans.append((name, start, end))

    def add(self, name: str, amount: float | Tensor) -> None:
        """Add to the total."""
        with _counting:
            self.totals[name] = self.totals.get(name, 0.0) + float(amount)

    def clear(self) -> None:
        """Forget everything recorded so far."""
        self.spans.clear()
        self.totals.clear()

    def seconds(self, name: str, since: float = 0.0) -> float:
        """Return the seconds spent in spans called `name`, counting only what lies after `since`."""
        return sum(end - max(start, since) for label, start, end in self.spans if label == name and end > since)


now = time.perf_counter
"""What time is it, in seconds?"""

_listeners: list[Listener] = []
_counting = threading.Lock()  # collectives end in threads of their own


@contextmanager
def listen(recorder: Recorder) -> Iterator[Recorder]:
    """Record what this process does while the context is open."""
    _listeners.append(recorder)
    try:
        yield recorder
    finally:
        _listeners.remove(recorder)


@contextmanager
def span(name: str, *own: Listener) -> Iterator[None]:
    """Time the enclosed block under `name`, for all registered listeners and the caller's `own`."""
    start = now()
    try:
        yield
    finally:
        took(name, start, own)


def took(name: str, start: float, own: Sequence[Listener] = ()) -> None:
    """End a span called `name` that began when it was `now`, in this or another thread."""
    end = now()
    for listener in (*_listeners, *own):
        listener.took(name, start, end)


def count(name: str, amount: float, *own: Listener) -> None:
    """Add `amount` to the total called `name`, for all registered listeners and the caller's `own`."""
    for listener in (*_listeners, *own):
        listener.add(name, amount)

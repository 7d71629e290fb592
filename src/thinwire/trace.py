"""Where do the time and the bytes of a step go? It costs next to nothing unless somebody listens."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Recorder:
    """What was recorded: spans as (name, start, end) in `time.perf_counter` seconds, and totals by name."""

    spans: list[tuple[str, float, float]] = field(default_factory=list)
    totals: dict[str, float] = field(default_factory=dict)

    def clear(self) -> None:
        """Forget everything recorded so far."""
        self.spans.clear()
        self.totals.clear()

    def seconds(self, name: str, since: float = 0.0) -> float:
        """Return the seconds spent in spans called `name`, counting only what lies after `since`."""
        return sum(end - max(start, since) for label, start, end in self.spans if label == name and end > since)


_listeners: list[Recorder] = []
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
def span(name: str) -> Iterator[None]:
    """Time the enclosed block under `name`."""
    start = time.perf_counter()
    try:
        yield
    finally:
        for recorder in _listeners:
            recorder.spans.append((name, start, time.perf_counter()))


def count(name: str, amount: float) -> None:
    """Add `amount` to the total called `name`."""
    with _counting:
        for recorder in _listeners:
            recorder.totals[name] = recorder.totals.get(name, 0.0) + amount

"""A worker made slower than it is, for rows that ask what a slow one costs the others."""

import time
from types import TracebackType
from typing import final


@final
class Slowness:
    """Within `with`, work takes `factor` times as long: it first sleeps by what this thread computed the last time."""

    def __init__(self, factor: float) -> None:
        self._factor, self._busy, self._start = factor, 0.0, 0.0

    def __enter__(self) -> None:
        time.sleep((self._factor - 1) * self._busy)
        self._start = time.thread_time()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._busy = time.thread_time() - self._start

"""How long a call takes."""

import time
from collections.abc import Callable


def seconds(call: Callable[[], object], repeats: int = 5) -> float:
    """Return the least time of several calls, after one that does not count."""
    call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)

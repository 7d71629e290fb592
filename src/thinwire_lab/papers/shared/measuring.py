"""How far off, how long, how small: the three measures that claims are judged by."""

import time
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from thinwire.codecs import Codec

LONG = 1 << 20
"""Elements of a vector so long that a header does not matter."""


def error(x: Tensor, restored: Tensor) -> float:
    """Return err² = ‖x − x̂‖²/‖x‖²."""
    x = x.reshape(-1).double()
    return float((x - restored.reshape(-1).double()).square().sum() / x.square().sum())


def seconds(call: Callable[[], object], repeats: int = 5, of: Callable[[Iterable[float]], float] = min) -> float:
    """Return the shortest time of several calls, or another figure `of` them, after a warm-up call."""
    call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return of(times)


def ratio(codec: Codec) -> float:
    """How many times fewer bytes than float32 really travel for a long vector, header included?"""
    return 4 * LONG / codec.encode(torch.randn(LONG, generator=torch.Generator().manual_seed(0))).nbytes

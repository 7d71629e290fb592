"""A GPU's streams: to encode, exchange and decode, one each, whatever the model, its buckets and their exchanges."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from threading import RLock
from typing import Any, Generic, ParamSpec, TypeVar, final

import torch

P = ParamSpec("P")
R = TypeVar("R")
PURPOSES = "encode", "exchange", "decode"


@final
class once(Generic[P, R]):  # noqa: N801 - a decorator
    """As `functools.cache`, but threads that ask at the same time are given the same."""

    def __init__(self, make: Callable[P, R]) -> None:
        self._make: Any = cache(make)
        self._lock, self.cache_clear = RLock(), self._make.cache_clear

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Return what was made for these arguments."""
        with self._lock:
            found: R = self._make(*args, **kwargs)
            return found


@once
def stream_of(device: torch.device, purpose: str) -> Any:
    """Return the stream of a GPU for a purpose. Its kernels go before those of backward, which nobody waits for."""
    return torch.cuda.Stream(device, priority=-1)


def follow_all(device: torch.device) -> None:
    """Have the current stream of a GPU wait for all that these have by now."""
    for purpose in PURPOSES:
        follow(torch.cuda.current_stream(device.index), stream_of(device, purpose))


@contextmanager
def within(stream: Any) -> Iterator[None]:
    """Have work go to a stream, as `torch.cuda.stream` does. That looks for devices first, for some 20 µs."""
    if torch.cuda.current_device() != stream.device_index:
        with torch.cuda.stream(stream):
            yield
        return
    before = torch.cuda.current_stream(stream.device_index)
    if before == stream:
        yield
        return
    torch.cuda.set_stream(stream)
    try:
        yield
    finally:
        torch.cuda.set_stream(before)


def follow(stream: Any, other: Any) -> None:
    """Have a stream wait for all that another one has by now."""
    if stream != other:
        stream.wait_stream(other)

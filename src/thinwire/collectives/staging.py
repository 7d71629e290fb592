"""Buffers for what is sent and received, kept from step to step, so that none is allocated anew.

A buffer that a step has used is free in the next one. By then every mean has been waited for, on a GPU by its streams,
so nobody waits here.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Lock
from typing import final

import torch
from torch import Tensor

from thinwire.kernels.memory import empty
from thinwire.kernels.replay import Replays


@final
class Staging:
    """The buffers of one model's buckets. Those that a turn has no use for are freed at its end."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []
        self._used: list[Tensor] = []
        self._needed = 0
        self._replays = weakref.WeakSet[Replays]()
        self._lock = Lock()  # buckets end in the threads of their collectives

    def turn(self) -> None:
        """Begin a reduction of all buckets, when those of the one before are done."""
        with self._lock:
            self._free, self._used, self._needed = self._used, [], 0

    def take(self, nbytes: int, device: torch.device) -> Tensor:
        """Return a buffer (uint8, uninitialised), for the taker alone until it is kept and a turn has begun."""
        with self._lock:
            for place, buffer in enumerate(self._free):
                if buffer.numel() == nbytes and buffer.device == device:
                    return self._free.pop(place)
        return empty(nbytes, torch.uint8, device)

    def keep(self, buffers: list[Tensor]) -> None:
        """Keep buffers for the next turn. One that is never kept, because its collective failed, is freed."""
        with self._lock:
            self._used += buffers

    def need(self, nbytes: int) -> None:
        """Note how much memory one reduction of a bucket takes beside these buffers, as its recipe declares it."""
        with self._lock:
            self._needed = max(self._needed, nbytes)

    @property
    def needed(self) -> int:
        """The largest of what has been noted since the turn began."""
        with self._lock:
            return self._needed

    def counting(self, replays: Replays) -> Replays:
        """Count what captured work keeps, too, for as long as it is there. Return it."""
        with self._lock:
            self._replays.add(replays)
        return replays

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers that are not in use at the moment, and of those that captured work keeps."""
        with self._lock:
            return sum(x.nbytes for held in (self._free, self._used, self._replays) for x in held)


_open: ContextVar[tuple[Staging, list[Tensor]] | None] = ContextVar("thinwire.staging", default=None)


@contextmanager
def taking(staging: Staging) -> Iterator[list[Tensor]]:
    """Within, `room` takes buffers from here. Yields the list of them, to keep when they are not needed any more."""
    taken: list[Tensor] = []
    token = _open.set((staging, taken))
    try:
        yield taken
    finally:
        _open.reset(token)


def room(nbytes: int, device: torch.device) -> Tensor:
    """Return a buffer (uint8, uninitialised), a new one where nobody lends any."""
    lender = _open.get()
    if lender is None:
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    staging, taken = lender
    taken.append(staging.take(nbytes, device))
    return taken[-1]


def used_here(*tensors: Tensor) -> None:
    """Say that the current stream uses tensors of another one, so that their memory is not given away before it has."""
    for x in tensors:
        if x.is_cuda:
            x.record_stream(torch.cuda.current_stream(x.get_device()))

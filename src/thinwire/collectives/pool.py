"""Several gathers as one message: over a link with latency, what is sent together takes one trip and not several."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import final

import torch
from torch import Tensor
from torch.futures import Future


@final
class Pool:
    """What a rank wants gathered: `message` is all of it, `deliver` hands out what everybody sent.

    Of what could be summed instead, it takes at most `summed` bytes at once.
    """

    def __init__(self, summed: float) -> None:
        self.summed = summed
        self._parts: list[tuple[Tensor, Future[Tensor]]] = []

    def gather(self, mine: Tensor) -> "Future[Tensor]":
        """Have a tensor travel with the others. The future holds everybody's, a row each."""
        future: Future[Tensor] = Future(devices=[mine.device] if mine.is_cuda else [])
        self._parts.append((mine, future))
        return future

    def message(self, device: torch.device | str = "cpu") -> Tensor:
        """Return the bytes to send."""
        parts = [mine.detach().contiguous().view(-1).view(torch.uint8).to(device) for mine, _ in self._parts]
        return torch.cat(parts)

    def deliver(self, rows: Tensor) -> None:
        """Take the messages of some ranks, a row each. Whoever waits for a part of them goes on."""
        rows = rows.view(len(rows), -1)
        for row in rows.split([mine.nbytes for mine, _ in self._parts], dim=1):
            mine, future = self._parts.pop(0)
            whole = row.to(mine.device, copy=True, memory_format=torch.contiguous_format)
            future.set_result(whole.view(mine.dtype).view(len(rows), *mine.shape))

    def fail(self, error: Exception) -> None:
        """Tell whoever waits that nothing comes."""
        parts, self._parts = self._parts, []
        for _, future in parts:
            future.set_exception(error)  # type: ignore[arg-type]  # torch has it for a result


_open: ContextVar[Pool | None] = ContextVar("thinwire.pool", default=None)


@contextmanager
def pooling(summed: float = 1 << 16) -> Iterator[Pool]:
    """Within, what can be gathered in one message is put into the pool. Its owner sends it.

    By default, up to 64 kB rather travel with the others, to all ranks, than take the trips of a ring.
    """
    pool = Pool(summed)
    token = _open.set(pool)
    try:
        yield pool
    finally:
        _open.reset(token)


def pooled() -> Pool | None:
    """Return the pool that is open, if any."""
    return _open.get()

"""What workers send each other in an outer step: one message, which says how much its sender's share counts."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, final

import torch
from torch import Tensor
from torch.futures import Future

from thinwire.collectives import Group, Pool, all_gather, plain_device, pooling


@final
class Meeting:
    """An exchange under way: what has been put into its pool travels with this worker's tick and weight.

    The weight is 0 if this worker has learnt nothing, and NaN if its Δ is not finite.

    `taken`: whether this worker's share is in the sum. Where workers come and go, that is None until it is decided.
    """

    def __init__(self, pool: Pool, group: Group, tick: int, weight: float) -> None:
        self._pool, self._device, self.tick = pool, plain_device(group), tick
        self.taken: bool | None = True
        words = torch.tensor([tick, weight], dtype=torch.float64, device=self._device)
        self._words: Future[Tensor] = pool.gather(words)

    @property
    def message(self) -> Tensor:
        """What this worker sends."""
        return self._pool.message(self._device)

    def begin(self, group: Group) -> None:
        """Send everything to all ranks of a group."""
        mine = self.message
        rows = mine.new_empty(group.size(), mine.numel())

        def arrived(done: "Future[Any]") -> None:
            try:
                done.value()
                self._pool.deliver(rows)
            except Exception as error:
                self._pool.fail(error)

        all_gather(rows.view(-1), mine, group).then(arrived)

    def arrive(self, messages: Sequence[bytes], *, taken: bool) -> None:
        """Take what was decided on."""
        self.taken = taken
        rows = [torch.frombuffer(bytearray(each), dtype=torch.uint8) for each in messages]
        self._pool.deliver(torch.stack(rows).to(self._device))

    def fail(self) -> None:
        """Give it up."""
        self.taken = False
        self._pool.fail(RuntimeError("the others have gone on"))

    @cached_property
    def _said(self) -> Sequence[float]:
        """Each worker's weight, once all have arrived. Raises RuntimeError if workers differ in step."""
        ticks, weights = self._words.wait().T.tolist()
        if len(set(ticks)) > 1:
            each = [int(tick) for tick in ticks]
            raise RuntimeError(f"workers are at different ticks ({each}): load the state of the same step on all")
        found: Sequence[float] = weights
        return found

    @property
    def weights(self) -> Sequence[float]:
        """How much each worker's share counts."""
        return [0.0 if math.isnan(each) else each for each in self._said]

    @property
    def sick(self) -> list[int]:
        """The ranks whose Δ is not finite."""
        return [rank for rank, each in enumerate(self._said) if math.isnan(each)]


@contextmanager
def meeting(group: Group, tick: int, weight: float, *, whole: bool = False) -> Iterator[tuple[Meeting, Pool]]:
    """Put into one message what is gathered within; with `whole`, also what a group would rather sum on the way."""
    with pooling(math.inf) if whole else pooling() as pool:
        yield Meeting(pool, group, tick, weight), pool

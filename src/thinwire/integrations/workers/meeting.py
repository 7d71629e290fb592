"""What workers send each other in an outer step: one message, which says how much its sender's share counts."""

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
    """An exchange under way: what has been put into `pool` travels with this worker's tick and weight."""

    def __init__(self, pool: Pool, group: Group, tick: int, weight: float) -> None:
        self._pool, self._group = pool, group
        words = torch.tensor([tick, weight], dtype=torch.float64, device=plain_device(group))
        self._words: Future[Tensor] = pool.gather(words)

    def begin(self) -> None:
        """Send everything."""
        mine = self._pool.message(plain_device(self._group))
        rows, pool = mine.new_empty(self._group.size(), mine.numel()), self._pool

        def arrived(done: "Future[Any]") -> None:
            try:
                done.value()
                pool.deliver(rows)
            except Exception as error:
                pool.fail(error)

        all_gather(rows.view(-1), mine, self._group).then(arrived)

    @cached_property
    def weights(self) -> Sequence[float]:
        """How much each worker's share counts, once all have arrived. Raises RuntimeError if workers differ in step."""
        ticks, weights = self._words.wait().T.tolist()
        if len(set(ticks)) > 1:
            raise RuntimeError(f"workers meet after {[int(tick) for tick in ticks]} ticks: load the same step on all")
        found: Sequence[float] = weights
        return found


@contextmanager
def meeting(group: Group, tick: int, weight: float) -> Iterator[tuple[Meeting, Pool]]:
    """Send in one message what is put into the pool within."""
    with pooling() as pool:
        found = Meeting(pool, group, tick, weight)
        yield found, pool
    found.begin()

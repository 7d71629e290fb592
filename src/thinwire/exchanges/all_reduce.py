"""Sum values as they travel."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

from torch import Tensor
from torch.futures import Future

from thinwire.collectives import Group, all_reduce, pooled, queued, room
from thinwire.exchanges.base import Exchange, Exchanged, Hops, Transport
from thinwire.payloads import Payload
from thinwire.trace import ring_bytes


@final
@dataclass(frozen=True, kw_only=True)
class AllReduce(Exchange):
    """Ring all-reduce of a summable payload's values. T = 2(K − 1)(α + n/(K·B))."""

    transport: ClassVar[Transport] = "all_reduce"

    def check(self, payload: Payload) -> None:
        """Raise TypeError for a payload whose values cannot be added."""
        if not payload.summable:
            raise TypeError(
                f"{type(payload).__name__} is not summable: its elements differ by rank, or are codes; use AllGather"
            )

    def start(
        self, payload: Payload, group: Group, *, keep: bool = True, seeds: Sequence[int] = ()
    ) -> "Future[Exchanged]":
        """Start the sum. Raises what `check` does."""
        self.check(payload)
        if (pool := pooled()) is not None and payload.values.nbytes <= pool.summed:
            whole = (group.size() - 1.0) * payload.values.nbytes

            def add(done: "Future[Tensor]") -> Exchanged:
                total, *others = done.value().unbind()
                for each in others:  # one by one, in the same order on all ranks
                    total += each
                return Exchanged(summed=payload.with_values(total), delivered=payload, sent_bytes=whole)

            return pool.gather(payload.values).then(add)
        values, total = payload.values, payload
        if keep:
            copied = room(values.nbytes, values.device).view(values.dtype).view_as(values).copy_(values)
            total = payload.with_values(copied)
        future, sent = all_reduce(total.values, group), ring_bytes(values.nbytes, group.size())

        def finish(done: "Future[object]") -> Exchanged:
            done.value()  # raises what the collective raised
            return Exchanged(summed=total, delivered=payload, sent_bytes=sent)

        return queued(future, total.values).then(finish)

    def arriving(self, values: int, world_size: int) -> float:
        """None: they are added in place."""
        return 0

    def hops(self, nbytes: float, world_size: int, whole: float = math.inf) -> Sequence[Hops]:
        """Return 2(K − 1) messages of n/K."""
        return [Hops(stride=1, count=2 * (world_size - 1), nbytes=nbytes / world_size)]

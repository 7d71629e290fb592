"""Send every rank's payload to all ranks."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from torch import Tensor
from torch.futures import Future

from thinwire.collectives import Group, all_gather, pooled, queued, room, used_here
from thinwire.exchanges.base import Exchange, Exchanged, Hops, Transport
from thinwire.payloads import Payload
from thinwire.waits import Verdict, noted_in, noting, on_host


@final
@dataclass(frozen=True, kw_only=True)
class AllGather(Exchange):
    """One all-gather of one packed buffer per rank, decoded in one go. T = (K − 1)(α + n/B)."""

    transport: ClassVar[Transport] = "all_gather"

    def start(
        self, payload: Payload, group: Group, *, keep: bool = True, seeds: Sequence[int] = ()
    ) -> "Future[Exchanged]":
        """Start gathering.

        Raises:
            PayloadError: If a rank's buffer has a different layout.
        """
        mine, pool = payload.packed, pooled()
        if pool is None:
            there = places(group.size(), mine.numel(), mine.device)
            gathered = queued(all_gather(there.view(-1), mine, group), mine)
        else:
            gathered = pool.gather(mine)
        sent, waits = (group.size() - 1) * mine.nbytes, noted_in() is None or on_host(mine)

        def finish(done: "Future[Any]") -> Exchanged:
            rows = done.value()  # raises what the collective raised
            buffers = there if pool is None else rows
            used_here(buffers)  # what is returned, torch itself records for later callbacks' streams
            if waits:
                return Exchanged(summed=received(payload, buffers, None), delivered=payload, sent_bytes=sent)
            return Exchanged(buffers=buffers, delivered=payload, sent_bytes=sent)

        return gathered.then(finish)

    def hops(self, nbytes: float, world_size: int, whole: float = math.inf) -> Sequence[Hops]:
        """Return K − 1 messages of n."""
        return [Hops(stride=1, count=world_size - 1, nbytes=nbytes)]


def places(ranks: int, nbytes: int, device: torch.device) -> Tensor:
    """Return room for a buffer of each rank, (ranks, nbytes)."""
    there = room(ranks * nbytes, device).view(ranks, nbytes)
    there[:, :1].zero_()  # it may hold an earlier step's payloads, which must not count if nothing arrives
    return there


def received(mine: Payload, buffers: Tensor, verdict: Verdict | None) -> Payload:
    """Return the sum of the ranks' buffers, laid out like `mine`. Raises PayloadError when malformed.

    If the host would have to wait for a GPU and there is a verdict, the fault is noted there instead of raised, and the
    sum is zero. The verdict, too, may be read only when the sum has been written.
    """
    if verdict is None:
        return mine.from_buffers(buffers)
    found = Verdict()
    with noting(found):
        total = mine.from_buffers(buffers)
    verdict.take_in(found.moved(list))
    flags = found.flags
    return total if flags is None or found.withheld else total.with_values(torch.where(flags.any(), 0, total.values))

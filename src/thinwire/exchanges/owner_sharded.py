"""Every key has an owner rank, which sums its rows."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

from typing_extensions import override

from thinwire.collectives import Group, Peers
from thinwire.exchanges.base import Exchanged, Hops
from thinwire.exchanges.merging import Rounds, together
from thinwire.payloads import Keyed
from thinwire.payloads.keyed import merged, where


@final
@dataclass(frozen=True, kw_only=True)
class OwnerSharded(Rounds):
    """Send rows to rank key mod K, which adds them and sends the sum to all (Fei et al. 2021; Kim et al. 2019).

    This takes an all-to-all and an all-gather, and the sum, in rank order, is exact. T is about 2(K − 1)(2α + n/(K·B))
    + (K − 1)·(u − n)/(K·B), where the ranks' picks together take u bytes.
    """

    uneven: ClassVar[bool] = True

    @override
    def run(self, own: Keyed, group: Group, seeds: Sequence[int]) -> Exchanged:
        peers, rows = Peers(group, own.values.device), merged([own])
        shards = [where(rows, rows.keys % peers.world_size == rank) for rank in range(peers.world_size)]
        mine = merged(_swapped(peers, shards))
        sums = _swapped(peers, [mine] * peers.world_size)
        return Exchanged(summed=merged(sums), delivered=own, sent_bytes=peers.sent_bytes)

    def hops(self, nbytes: float, world_size: int, whole: float = math.inf) -> Sequence[Hops]:
        """Return, for each of the K − 1 other ranks, a length and 1/K of this rank's rows, a length and 1/K of all."""
        sent = nbytes + together(nbytes, world_size, whole)
        return [Hops(stride=s, count=4, nbytes=sent / world_size / 4) for s in range(1, world_size)]


def _swapped(peers: Peers, shards: list[Keyed]) -> list[Keyed]:
    """Send shard r to rank r, and return what each rank has for this one, in rank order."""
    ranks = range(peers.world_size)
    others = [rank for rank in ranks if rank != peers.rank]
    inbox = peers.swap({rank: shards[rank].to_buffer() for rank in others}, others)
    return [shards[rank] if rank == peers.rank else shards[0].received(inbox[rank]) for rank in ranks]

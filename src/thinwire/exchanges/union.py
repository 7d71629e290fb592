"""Agree on the keys first, then sum their rows as if they were dense."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated, ClassVar, final

import torch
from torch import Tensor

from thinwire.checked import Such, checked
from thinwire.collectives import Group, Peers, all_or
from thinwire.exchanges.base import Encoder, Exchanged, Hops, Transport
from thinwire.exchanges.merging import Rounds, together
from thinwire.payloads import Keyed, Payload, fitted
from thinwire.payloads.keyed import spread

_FIX = "use Cast(values=torch.bfloat16), CountSketch(...) or None"
# A str has a method `encode` of its own.
Packed = Annotated[Encoder | None, Such(f"a codec of summable payloads: {_FIX}", lambda x: not isinstance(x, str))]


@final
@checked
@dataclass(frozen=True, kw_only=True)
class UnionAllReduce(Rounds):
    """Combine bitmaps of the ranks' keys by OR, then sum the rows of the union by a ring all-reduce.

    The sum is exact. T = 2(K − 1)(2α + (bitmap + union)/(K·B)).

    Args:
        packed: A codec of summable payloads that encodes the rows: `Cast(values=torch.bfloat16)`, or
            `CountSketch(...)`, which makes this the S2 reducer (Ge et al. 2021).
    """

    uneven: ClassVar[bool] = True
    transport: ClassVar[Transport] = "all_reduce"
    packed: Packed = None

    def run(self, own: Keyed, group: Group, seeds: Sequence[int]) -> Exchanged:
        """Exchange and wait.

        Raises:
            TypeError: If payloads of `packed` cannot be added.
        """
        peers = Peers(group, own.values.device)
        keys = _union(peers, own, group)
        total = own.rekeyed(keys, spread(own, keys))
        if keys.numel():
            total = total.rekeyed(total.keys, self._sum(peers, total, seeds))
        return Exchanged(summed=total, delivered=own, sent_bytes=peers.sent_bytes)

    def hops(self, nbytes: float, world_size: int, whole: float = math.inf) -> Sequence[Hops]:
        """Return 2(K − 1) messages for the bitmap, and as many for the union's rows, as long as `packed` makes them."""
        packed = self.share() * together(nbytes, world_size, whole)
        return [Hops(stride=1, count=4 * (world_size - 1), nbytes=packed / world_size / 2)]

    def share(self) -> float:
        """Return how many bytes of rows travel for one that they have."""
        if self.packed is None:
            return 1.0
        sample = torch.zeros(1 << 16, dtype=torch.float32, device="cpu")
        return self.packed.encode(sample).values.nbytes / sample.nbytes

    def _sum(self, peers: Peers, mine: Keyed, seeds: Sequence[int]) -> Tensor:
        """Return the sums of the rows, in the order of `mine`."""
        if self.packed is None:
            rows = mine.rows.contiguous()
            peers.all_reduce(rows)
            return rows
        payload = _encoded(self.packed, mine.rows.split(mine.region_counts()), seeds)
        if not payload.summable or isinstance(payload, Keyed):
            raise TypeError(f"packed is {self.packed!r}, whose payloads cannot be summed over ranks: {_FIX}")
        values = payload.values.clone()
        peers.all_reduce(values)
        # An estimate may be larger than any sum can be. Clamping it to the range makes its error smaller.
        return fitted(payload.with_values(values).dense(), mine.rows.dtype).view(mine.rows.shape)


def _encoded(packed: Encoder, regions: Sequence[Tensor], seeds: Sequence[int]) -> Payload:
    parts = [packed.encode(rows, seed=seed) for rows, seed in zip(regions, seeds, strict=True) if rows.numel()]
    *starts, end = accumulate((part.numel for part in parts), initial=0)
    return type(parts[0]).assemble(parts, starts, end)


def _union(peers: Peers, own: Keyed, group: Group) -> Tensor:
    """Return the keys that any rank holds, ascending."""
    flags = torch.zeros(own.key_space, dtype=torch.int16, device=own.keys.device)
    flags[own.keys] = 1
    anywhere, nbytes = all_or(flags, group)
    peers.count_ring(nbytes)
    return anywhere.nonzero().view(-1).to(torch.int32)

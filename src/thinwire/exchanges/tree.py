"""gTop-k's all-reduce."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, final

import torch
from typing_extensions import override

from thinwire.checked import checked
from thinwire.collectives import Group, Peers
from thinwire.exchanges.base import Exchanged, Hops
from thinwire.exchanges.merging import Rounds
from thinwire.payloads import Keyed
from thinwire.payloads.keyed import merged, spread, where

Merge = Literal["exact", "paper"]


@final
@checked
@dataclass(frozen=True, kw_only=True)
class GlobalTopKTree(Rounds):
    """Add k rows of two ranks at a time, up a tree, and keep the k largest (gTop-k, Shi et al. 2019, Algorithms 2-4).

    All ranks get the root's k rows. k is per tensor, and rows are ranked by their ℓ2 norm. T = 2⌈log₂ K⌉(α + n/B).

    Args:
        merge: Rows that an "exact" merge drops stay with the rank that merged, so nothing is lost. With "paper", each
            rank instead keeps its own picks that are not in the outcome: a pick that one subtree drops but another
            brings to the root is lost.
        exact_values: Whether the tree only finds the indices, and one more all-reduce of k rows sums what every rank
            picked there.
    """

    merge: Merge = "exact"
    exact_values: bool = False

    @override
    def run(self, own: Keyed, group: Group, seeds: Sequence[int]) -> Exchanged:
        peers = Peers(group, own.values.device)
        outcome, dropped = _up(peers, own, own.region_counts())
        outcome = _down(peers, outcome, own)
        if self.merge == "exact" and not self.exact_values:  # less what was dropped, which ranks below may have picked
            delivered = merged([own, *(rest.rekeyed(rest.keys, -rest.rows) for rest in dropped)])
        else:
            own = merged([own])
            delivered = where(own, torch.isin(own.keys, outcome.keys))
        if self.exact_values:
            rows = spread(delivered, outcome.keys)
            peers.all_reduce(rows)
            outcome = outcome.rekeyed(outcome.keys, rows)
        return Exchanged(summed=outcome, delivered=delivered, sent_bytes=peers.sent_bytes)

    def arriving(self, values: int, world_size: int) -> float:
        """One table in each round."""
        return values * (2 + math.log2(world_size))

    def hops(self, nbytes: float, world_size: int, whole: float = math.inf) -> Sequence[Hops]:
        """Return a message up and one down for each of ⌈log₂ K⌉ levels, without the all-reduce for exact values."""
        levels = range(math.ceil(math.log2(world_size)))
        return [Hops(stride=1 << level, every=2 << level, count=2, nbytes=nbytes) for level in levels]


def _up(peers: Peers, own: Keyed, counts: list[int]) -> tuple[Keyed, list[Keyed]]:
    """Merge towards rank 0. Return the rows this rank passed on (the root: kept), and those its merges dropped."""
    current, dropped = merged([own]), []
    reach = 1
    while reach < peers.world_size:
        if peers.rank % (2 * reach):
            peers.send(current.filled(own.keys.numel()).to_buffer(), peers.rank - reach)
            break
        if peers.rank + reach < peers.world_size:
            theirs = own.received(peers.receive(own.nbytes, peers.rank + reach))
            current, rest = _largest(merged([current, theirs]), counts)
            dropped.append(rest)
        reach *= 2
    return current, dropped


def _down(peers: Peers, outcome: Keyed, like: Keyed) -> Keyed:
    """Send the root's outcome to all, along the same tree."""
    outcome = merged([outcome.filled(like.keys.numel())]) if peers.rank == 0 else outcome  # as the others will read it
    reach = 1 << max(0, (peers.world_size - 1).bit_length() - 1)
    while reach:
        if peers.rank % (2 * reach) == reach:
            outcome = like.received(peers.receive(like.nbytes, peers.rank - reach))
        elif peers.rank % (2 * reach) == 0 and peers.rank + reach < peers.world_size:
            peers.send(outcome.filled(like.keys.numel()).to_buffer(), peers.rank + reach)
        reach //= 2
    return outcome


def _largest(rows: Keyed, counts: list[int]) -> tuple[Keyed, Keyed]:
    """Split off the largest rows, `counts` of each region, from the rest. Rows that are not finite rank highest."""
    best = torch.zeros(rows.keys.numel(), dtype=torch.bool, device=rows.keys.device)
    norms = torch.linalg.vector_norm(rows.rows, dim=1)
    regions = rows.region_counts()
    for norm, chosen, count in zip(norms.split(regions), best.split(regions), counts, strict=True):
        chosen[norm.topk(min(count, norm.numel()), sorted=False).indices] = True
    return where(rows, best), where(rows, ~best)

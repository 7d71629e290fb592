"""Networks on which some ranks are nearer than others, and rings through them. Links are full duplex."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, final

import numpy as np
import numpy.typing as npt

from thinwire.exchanges import Hops, Link, Network

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

MOST = 12
"""The number of regions up to which `ring` looks at all orders."""
_REFERENCE = 1e6  # bytes of the message by which `ring` compares edges, unless told otherwise


class Uneven(ABC):
    """A network that knows each message's latency, and its share of the links that it has in common with others.

    Messages go from rank i to i + stride, modulo the world size if all send. Networks are hashable, as we cache hops.
    To add one, subclass this, and read it from text in options.py.
    """

    @abstractmethod
    def paths(self, senders: Integers, receivers: Integers, world_size: int) -> tuple[Floats, Floats]:
        """Return the latency and the bandwidth that each message sees when all are under way at once."""

    @final
    def hop(self, hops: Hops, world_size: int) -> Link:
        """Return what the slowest message sees. Raises ValueError for a stride or an `every` below 1."""
        if min(hops.stride, hops.every, world_size) < 1:
            raise ValueError(f"{hops} between {world_size} ranks: expected a stride, an every and a world of 1 or more")
        slow = _slow(self, hops.stride, hops.every, hops.swap, world_size)
        return max(slow, key=lambda link: link.seconds(hops.nbytes))


@final
@dataclass(frozen=True)
class Tiers(Uneven):
    """Ranks in groups, which form larger groups, and so on: hosts, racks, the hall.

    groups: (ranks, link), the nearest first. Messages within a group of `ranks` neighbours see its `link`, and those
    beyond the last group see `beyond`. Each rank has its own first link. The ranks of a group share one link of the
    next kind to the outside. A message has the latency of the farthest link and the least bandwidth on its way. Raises
    ValueError unless each size is a multiple of the one before.
    """

    groups: tuple[tuple[int, Link], ...]
    beyond: Link

    def __post_init__(self) -> None:
        sizes = [1, *(size for size, _ in self.groups)]
        if any(larger <= size or larger % size for size, larger in pairwise(sizes)):
            raise ValueError(f"groups of {sizes[1:]} ranks; expected each size to be a multiple of the one before")

    def paths(self, senders: Integers, receivers: Integers, world_size: int) -> tuple[Floats, Floats]:
        """Share each group's links out and in among the messages that take them."""
        latency, bandwidth = np.zeros(len(senders)), np.full(len(senders), np.inf)
        sizes = (1, *(min(size, world_size) for size, _ in self.groups))
        links = (*(link for _, link in self.groups), self.beyond)
        for size, link in zip(sizes, links, strict=True):
            away = senders // size != receivers // size
            flows = np.maximum(_alike(senders[away] // size), _alike(receivers[away] // size))
            bandwidth[away] = np.minimum(bandwidth[away], link.bandwidth / flows)
            latency[away] = link.latency
        return latency, bandwidth


@final
@dataclass(frozen=True)
class Regions(Uneven):
    """Regions far from each other. Ranks fill them one after the other, as evenly as possible.

    links: from each region (row) to each (column). Messages that go the same way at once share the bandwidth. The
    diagonal has each rank's own link, for messages within the region and on the way out. Raises ValueError unless
    `links` is square.
    """

    names: tuple[str, ...]
    links: tuple[tuple[Link, ...], ...]

    def __post_init__(self) -> None:
        if not self.names or [len(row) for row in self.links] != [len(self.names)] * len(self.names):
            rows = [len(row) for row in self.links]
            raise ValueError(f"links has rows of {rows} for {len(self.names)} regions; expected a square, at least 1")

    def reordered(self, order: Sequence[int]) -> "Regions":
        """Return the same network with the regions in another order."""
        links = tuple(tuple(self.links[a][b] for b in order) for a in order)
        return Regions(tuple(self.names[a] for a in order), links)

    def paths(self, senders: Integers, receivers: Integers, world_size: int) -> tuple[Floats, Floats]:
        """Share the link between two regions among its messages. Each rank's own link limits them too."""
        count = len(self.names)
        a, b = senders * count // world_size, receivers * count // world_size
        latency = np.array([[link.latency for link in row] for row in self.links])
        bandwidth = np.array([[link.bandwidth for link in row] for row in self.links])
        shared = bandwidth[a, b] / np.where(a == b, 1, _alike(a * count + b))
        own = np.minimum(bandwidth[a, a], bandwidth[b, b])
        return np.where(senders == receivers, 0.0, latency[a, b]), np.minimum(shared, own)


@final
@dataclass(frozen=True)
class Limited:
    """A network on which no message is faster than `best`, because processors handle every message."""

    network: Network
    best: Link

    def hop(self, hops: Hops, world_size: int) -> Link:
        """Return what the slowest message sees."""
        link = self.network.hop(hops, world_size)
        return Link(latency=max(link.latency, self.best.latency), bandwidth=min(link.bandwidth, self.best.bandwidth))


def ring(regions: Regions, nbytes: float = _REFERENCE) -> Regions:
    """In which order should a ring visit the regions, so that its slowest edge is as fast as possible?

    An edge costs what a message of `nbytes` takes, in the slower direction. Of all such rings, we take the one with the
    least sum. The result is exact, by dynamic programming over subsets (Held and Karp): first on the largest edge, then
    on the sum of edges that do not exceed it. Raises ValueError for more than 12 regions.
    """
    count = len(regions.names)
    if count > MOST:
        raise ValueError(f"{count} regions have too many orders to try; expected at most {MOST}: keep them as they are")
    cost = [
        [max(regions.links[a][b].seconds(nbytes), regions.links[b][a].seconds(nbytes)) for b in range(count)]
        for a in range(count)
    ]
    if count < 4:
        return regions  # all rings are the same
    tightest = slowest_edge(_tour(cost, max), cost)
    allowed = [[c if c <= tightest else float("inf") for c in row] for row in cost]
    return regions.reordered(_tour(allowed, lambda so_far, edge: so_far + edge))


def slowest_edge(order: Sequence[int], cost: Sequence[Sequence[float]]) -> float:
    """Return the cost of the most expensive edge of the ring."""
    return max(cost[a][b] for a, b in pairwise([*order, order[0]]))


def _alike(keys: Integers) -> Integers:
    """Return, for each key, how many keys equal it."""
    counts: Integers = np.bincount(keys)
    return counts[keys]


@lru_cache(maxsize=1 << 14)
def _slow(network: Any, stride: int, every: int, swap: bool, world_size: int) -> tuple[Link, ...]:
    """Return the links that the hop's messages see. Leave out a link if another is slower at every size."""
    senders = np.arange(0, world_size, every)
    receivers = senders ^ stride if swap else senders + stride
    if swap or every > 1:  # these end where the ranks do, and a ring goes round
        senders, receivers = senders[receivers < world_size], receivers[receivers < world_size]
    latency, bandwidth = network.paths(senders, receivers % world_size, world_size)
    slow = [Link(latency=0.0, bandwidth=float("inf"))]
    for late, narrow in sorted(set(zip((-latency).tolist(), bandwidth.tolist(), strict=True))):
        if narrow < slow[-1].bandwidth:
            slow.append(Link(latency=-late, bandwidth=narrow))
    return tuple(slow)


def _tour(cost: Sequence[Sequence[float]], joined: Callable[[float, float], float]) -> list[int]:
    """Return the cheapest ring from 0 through all. `joined` adds an edge to the cost so far."""
    count = len(cost)
    best: dict[tuple[int, int], tuple[float, tuple[int, ...]]] = {(1, 0): (0.0, (0,))}
    for seen in range(1, 1 << count, 2):
        for last in range(count):
            here = best.get((seen, last))
            for after in range(count) if here else ():
                grown = (seen | 1 << after, after)
                if here and grown[0] != seen:
                    found = (joined(here[0], cost[last][after]), (*here[1], after))
                    best[grown] = min(found, best.get(grown, found))
    closed = (
        (joined(taken, cost[last][0]), path)
        for last in range(1, count)
        for taken, path in [best[(1 << count) - 1, last]]
    )
    return list(min(closed)[1])

"""The order of regions on a ring."""

from collections.abc import Callable, Sequence
from itertools import pairwise

from thinwire.planner.network import Regions

MOST = 12
"""Regions up to which all orders are looked at."""
REFERENCE = 1e6
"""Bytes of the message by which edges are compared, unless said otherwise."""


def ring(regions: Regions, nbytes: float = REFERENCE) -> Regions:
    """Return the regions so that the slowest edge of the ring through them is as fast as it can be.

    An edge costs a message of `nbytes`, the slower way round. Of all such rings, the one of least sum. Exact, by
    dynamic programming over subsets (Held and Karp), first on the largest edge and then on the sum of those that do not
    exceed it. Raises ValueError for more than 12 regions.
    """
    count = len(regions.names)
    if count > MOST:
        raise ValueError(
            f"{count} regions have too many orders to look at; expected at most {MOST}: keep them as they are"
        )
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
    """Return the cost of the dearest edge of the ring."""
    return max(cost[a][b] for a, b in pairwise([*order, order[0]]))


def _tour(cost: Sequence[Sequence[float]], joined: Callable[[float, float], float]) -> list[int]:
    """Return the ring from 0 through all that costs least, its edges' costs `joined` one after the other."""
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

"""What do gTop-k's own α and β predict (Shi et al. 2019)? Table I, Fig. 9, Fig. 10 and Table IV."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import log2
from typing import final

from thinwire.exchanges import AllGather, GlobalTopKTree, Link
from thinwire.planner.scaling import Scale, scaled
from thinwire_lab.simulate.published import PAIR, published

ALPHA, BETA = 0.436e-3, 3.6e-8
"""Seconds of a message, and seconds per element of 4 bytes, fitted by the authors between two of their machines."""
LINK = Link(latency=ALPHA, bandwidth=4 / BETA)
DENSITY, WORKERS = 0.001, 32
NAMES = ("dense", f"topk:{DENSITY:g}", f"gtopk:{DENSITY:g}")
_PICKED = DENSITY * 25_000_000

PUBLISHED = {
    4: (6.27, 8.94),
    8: (13.91, 13.42),
    16: (28.74, 17.89),
    32: (57.98, 22.36),
    64: (116.02, 26.83),
    128: (231.65, 31.30),
}
"""Milliseconds of all-gather and tree by the formulas of their Table I, as in Fig. 9 (left)."""


def gather_seconds(workers: float, picked: float) -> float:
    """Seconds of an all-gather, by Eq. 6, if every worker picks `picked` elements."""
    return log2(workers) * ALPHA + 2 * (workers - 1) * picked * BETA


def tree_seconds(workers: float, picked: float) -> float:
    """Seconds of the tree for the same, by Eq. 7."""
    return 2 * log2(workers) * ALPHA + 4 * log2(workers) * picked * BETA


@final
@dataclass(frozen=True, kw_only=True)
class Times:
    """Milliseconds of exchanging the largest of 25·10⁶ elements: theirs, their formula's, and our exchanges'."""

    workers: int
    gather_theirs: float
    gather_formula: float
    gather_ours: float
    tree_theirs: float
    tree_ours: float


def times() -> list[Times]:
    """Return Table I. Our all-gather is a ring of P − 1 messages; theirs counts the latency of only log₂ P."""
    picked = PAIR * _PICKED
    return [
        Times(
            workers=workers,
            gather_theirs=gather,
            gather_formula=1e3 * gather_seconds(workers, _PICKED),
            gather_ours=1e3 * AllGather().seconds(picked, workers, LINK),
            tree_theirs=tree,
            tree_ours=1e3 * GlobalTopKTree().seconds(picked, workers, LINK),
        )
        for workers, (gather, tree) in PUBLISHED.items()
    ]


def crossings() -> tuple[float, float]:
    """Above how many workers is the tree faster: than their all-gather, and than a ring?"""
    message = LINK.seconds(PAIR * _PICKED)

    def by_tree(workers: float) -> float:
        return tree_seconds(workers, _PICKED)

    return (
        _crossing(lambda workers: gather_seconds(workers, _PICKED), by_tree),
        _crossing(lambda workers: (workers - 1) * message, by_tree),
    )


def _crossing(first: Callable[[float], float], second: Callable[[float], float]) -> float:
    low, high = 2.5, 1e3  # at two workers both may be equal
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if first(middle) < second(middle) else (low, middle)
    return low


@final
@dataclass(frozen=True, kw_only=True)
class System:
    """One of their models: samples per worker and step, and samples per second at 32 workers by each of NAMES.

    numel is usual for these architectures; the paper gives it only for ResNet-50.
    """

    name: str
    numel: int
    batch: int
    throughput: tuple[float, float, float]

    @property
    def seconds(self) -> list[float]:
        """Seconds of a step with 32 workers, as published."""
        return [WORKERS * self.batch / found for found in self.throughput]

    @property
    def rest(self) -> float:
        """Seconds of their gTop-k step without the messages of its tree: computing and selecting together."""
        return self.seconds[2] - GlobalTopKTree().seconds(PAIR * DENSITY * self.numel, WORKERS, LINK)

    @property
    def implied(self) -> tuple[float, float]:
        """Bytes per second at which a ring all-reduce and an all-gather would explain their step times."""
        rounds, wire = WORKERS - 1, [found - self.rest for found in self.seconds]
        dense = 2 * rounds * 4 * self.numel / WORKERS / (wire[0] - 2 * rounds * ALPHA)
        return dense, rounds * PAIR * DENSITY * self.numel / (wire[1] - rounds * ALPHA)

    def predicted(self, worlds: Sequence[int] = (WORKERS,)) -> list[Scale]:
        """Predict their steps from α and β, without overlap, as in their Eq. 4."""
        return scaled(published(self.numel, self.rest, LINK, dict.fromkeys(NAMES[1:], 0.0)), NAMES, worlds, LINK)


SYSTEMS = (
    System(name="VGG-16", numel=14_728_266, batch=128, throughput=(403, 2016, 3020)),
    System(name="ResNet-20", numel=269_722, batch=128, throughput=(9212, 22272, 25280)),
    System(name="AlexNet", numel=61_100_840, batch=64, throughput=(39, 296, 505)),
    System(name="ResNet-50", numel=25_557_032, batch=256, throughput=(343, 978, 1251)),
)

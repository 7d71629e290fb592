"""What do DRAGONN's own figures predict (Wang et al. 2022)? The XML model on 16 GPUs at 25 Gbit/s."""

from collections.abc import Sequence
from typing import NamedTuple

from thinwire.exchanges import AllGather, AllReduce
from thinwire.planner.scaling import scaled
from thinwire_lab.simulate.published import COMPUTED, LINK, MEASURED, XML, xml

WORKERS, DENSITY = 16, 0.001
SPEEDUPS = {"dgc": 10.2, "dragonn": 22.4}
"""Published speed-ups over full synchronisation, with 16 GPUs."""
BREAK_EVEN = 2**21
"""Below this tensor size in bytes, their DGC was slower than no compression."""
_ENCODE = {"dgc": 35.4e-3, "dragonn": 13.2e-3}
"""Seconds to encode 512 MB."""
_SHARE = 2 * DENSITY  # of the bytes, with indices


class Speeds(NamedTuple):
    """Seconds of a step without compression, with DGC and with DRAGONN, and of computing alone."""

    workers: int
    full: float
    dgc: float
    dragonn: float
    alone: float = COMPUTED

    @property
    def bound(self) -> float:
        """How many times faster would a step be with free communication?"""
        return self.full / self.alone


def speeds(worlds: Sequence[int]) -> list[Speeds]:
    """Predict their Fig. 3 (d). All three use one exchange, so DGC and DRAGONN differ in encoding only."""
    name = f"sampled_topk:{DENSITY:g}"
    dgc, dragonn = (scaled(xml(encode=_ENCODE[system]), ("dense", name), worlds, LINK) for system in ("dgc", "dragonn"))
    return [
        Speeds(one.world_size, one.seconds["dense"], one.seconds[name], two.seconds[name])
        for one, two in zip(dgc, dragonn, strict=True)
    ]


def last_gather() -> float:
    """Return the workers above which an all-gather takes longer than the uncompressed ring: 2/γ."""
    return 2 / _SHARE


class Implied(NamedTuple):
    """What their figures imply, if the rest of the model is right.

    dense_bandwidth: bytes per second of their uncompressed run. dgc_decode: extra seconds of DGC's decoding.
    compression: seconds of compressing and decompressing BREAK_EVEN bytes; overhead: the part of them that does not
    grow with size; both except 15 α.
    """

    dense_bandwidth: float
    dgc_decode: float
    compression: float
    overhead: float


def implied() -> Implied:
    """Solve their figures for the numbers they do not give."""
    (at,) = speeds((WORKERS,))
    full = SPEEDUPS["dragonn"] * at.dragonn
    gains = AllReduce().seconds(BREAK_EVEN, WORKERS, LINK) - AllGather().seconds(_SHARE * BREAK_EVEN, WORKERS, LINK)
    return Implied(
        dense_bandwidth=2 * (WORKERS - 1) / WORKERS * 4 * XML / (full - COMPUTED),
        dgc_decode=full / SPEEDUPS["dgc"] - at.dgc,
        compression=gains,
        overhead=gains - _ENCODE["dgc"] * BREAK_EVEN / 4 / MEASURED,
    )

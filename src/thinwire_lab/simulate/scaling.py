"""Scaling: what a step would take with more ranks than you have."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, final

from thinwire.exchanges import Link, Network
from thinwire.planner.candidates import DENSE, Budget, candidate
from thinwire.planner.decide import TOLERANCE, chosen
from thinwire.planner.profile import TRANSPORTS, Bucket, Cost, Curve, Gradient, Profile, Timeline
from thinwire.planner.timeline import check_finite, step_seconds
from thinwire_lab.inputs import BadInput
from thinwire_lab.simulate.network import Limited

LINK = Link(latency=0.0, bandwidth=25e9 / 8)
"""Between the machines of DRAGONN (Wang et al. 2022); their latency is not published."""
XML = 4096 * 30938
"""Elements of its XML model, a single layer."""
_COMPUTED = 25e-3
_ENCODE = 13.2e-3 * XML / (2**29 / 4)
"""Seconds to encode it at any density (their 5.2): 13.2 ms for "512 MB", of tensors whose sizes are powers of two."""
_PAIR = 8
"""Bytes of an index and a value."""


def xml(densities: Sequence[float]) -> Profile:
    """Return DRAGONN's XML model. Decoding and merging, which are not published, count as free.

    It has one layer, so its gradient comes at the end of backward, and nothing overlaps.
    """
    families = ("sampled_topk", "sampled_doubling", "sampled_gtopk")
    gradient = Gradient(name="all parameters", numel=XML)
    return Profile(
        world_size=1,
        timeline=Timeline(buckets=(Bucket(ready=_COMPUTED, gradients=(gradient,)),), computed=_COMPUTED),
        links=dict.fromkeys(TRANSPORTS, LINK),
        costs={f"{family}:{density:g}": _cost(density) for family in families for density in densities},
    )


def _cost(density: float) -> Cost:
    free, taken, nbytes = (Curve(((float(XML), value),)) for value in (0.0, _ENCODE, _PAIR * density * XML))
    return Cost(encode=taken, decode=free, each=free, exchange=free, nbytes=nbytes)


PLANNED = "planned"
"""How a `Scale` names the planner's own choice."""
SMALLEST = 1024
"""Tensors with fewer elements go uncompressed, as in the recipes."""

_FASTEST = Link(latency=0.0, bandwidth=float("inf"))


@final
@dataclass(frozen=True, kw_only=True)
class Scale:
    """A step with `world_size` ranks: seconds by candidate, and `alone`, the seconds of a single worker.

    choice: the planner's candidate for each tensor.
    """

    world_size: int
    alone: float
    seconds: Mapping[str, float]
    choice: Mapping[str, str]

    def efficiency(self, name: str) -> float:
        """Return the throughput relative to as many workers that never wait for each other."""
        return self.alone / self.seconds[name] if self.seconds[name] > 0 else 1.0

    @property
    def best(self) -> str:
        """The candidate with the shortest step; the first of equal ones."""
        return min((name for name in self.seconds if name != PLANNED), key=self.seconds.__getitem__)


def scaled(
    profile: Profile, names: Sequence[str], worlds: Sequence[int], network: Network | None = None
) -> list[Scale]:
    """Predict a step in each world size: with each candidate for all tensors of 1,024 elements or more, and as planned.

    Every rank does as much work as in the profile (weak scaling). network: joins the ranks; by default, links as
    measured. No message is faster than the profile's processors were. A single worker compresses nothing. Raises
    ValueError for a candidate without costs in the profile, or with costs that make a step endless.
    """
    for name in names:
        candidate(name)
        if name != DENSE.name and name not in profile.costs:
            has = ", ".join((DENSE.name, *profile.costs))
            raise ValueError(f"the profile has no costs of {name!r}; expected some of {has}")
    return [_scale(on(profile, network, world), names) for world in worlds]


def on(profile: Profile, network: Network | None, world_size: int) -> Profile:
    """Return the profile with that many ranks on that network. No message becomes faster than measured."""
    if world_size < 1:
        raise ValueError(f"world_size is {world_size}; expected 1 or more")
    if network is None:
        return replace(profile, world_size=world_size)
    best = profile.on(_FASTEST).links
    links: dict[Any, Any] = {t: Limited(network, best[t]) for t in TRANSPORTS}  # all a timeline asks of them is `hop`
    return replace(profile, world_size=world_size, links=links)


def _scale(profile: Profile, names: Sequence[str]) -> Scale:
    alone = profile.timeline.computed + profile.timeline.rest
    large = [each.name for each in profile.timeline.gradients if each.numel >= SMALLEST and profile.world_size > 1]
    seconds = {name: step_seconds(profile, dict.fromkeys(large, name)) for name in names}
    for name, took in seconds.items():
        check_finite(took, name)
    choice = _chosen(profile, names)
    return Scale(
        world_size=profile.world_size,
        alone=alone,
        seconds=seconds | {PLANNED: step_seconds(profile, choice)},
        choice=choice,
    )


def _chosen(profile: Profile, names: Sequence[str]) -> dict[str, str]:
    """Return the planner's choice among these candidates."""
    found = chosen(profile, Budget(names=[name for name in names if name != DENSE.name]), TOLERANCE)
    return {each.name: found.get(each.name, DENSE.name) for each in profile.timeline.gradients}


_UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_TIME = rf"(\d+(?:\.\d+)?) *({'|'.join(_UNITS)})"
_NOTICED = 4.0  # seconds for which `thinwire.outer` waits for a worker that is gone without a word


@final
@dataclass(frozen=True, kw_only=True)
class Faults:
    """Each worker fails after `between` seconds on average, whenever it may be, and works again after `gone` more."""

    between: float
    gone: float

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read ``24h/5min``. Raises BadInput for anything else or a time of 0."""
        match = re.fullmatch(rf"{_TIME} */ *{_TIME}", text.strip(), re.ASCII)
        between, gone = (float(match[at]) * _UNITS[match[at + 1]] for at in (1, 3)) if match else (0.0, 0.0)
        if not 0 < between <= between + gone < math.inf:
            raise BadInput(
                f"--faults {text!r}: expected how long a worker runs on average and until it is back, such as 24h/5min"
            )
        return cls(between=between, gone=gone)

    def together(self, workers: int) -> float:
        """Return the share of the time in which workers compute that stand still whenever one is gone."""
        return 1 / (1 + workers * self.gone / self.between)

    def apart(self, workers: int, lost: float) -> float:
        """Return that share where the others go on, and a fault costs so many seconds of a worker's own steps."""
        return self.between / (self.between + self.gone + lost) / (1 + workers * _NOTICED / self.between)

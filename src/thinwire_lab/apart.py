"""What would a step take if workers trained on their own, and when would they reach a given loss?"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import NamedTuple, final

from thinwire.exchanges import AllGather, AllReduce, Exchange
from thinwire.planner.candidates import measured
from thinwire.planner.plan import Plan
from thinwire.planner.profile import Profile

STEPS = 1000
"""`Way.until` counts to the loss that uncompressed training has after so many steps."""


@final
@dataclass(frozen=True, kw_only=True)
class Scheme:
    """Outer steps as the planner sees them: what one exchange sends of a fragment, how, and how late it may come.

    bits: of the payload, per element, scales and indices included.
    """

    bits: float
    exchange: Exchange
    fragments: int = 1
    delay: int = 0

    def nbytes(self, profile: Profile, every: int) -> float:
        """Return the bytes of payload for each inner step."""
        return self.bits / 8 * trained(profile) / every

    def seconds(self, profile: Profile, every: int) -> float:
        """Return the mean seconds of an inner step if workers meet after every so many.

        Encoding and decoding, once in so many steps, count as free.
        """
        alone = profile.timeline.computed + profile.timeline.rest
        link = profile.links[self.exchange.transport]
        nbytes = self.bits / 8 * trained(profile) / self.fragments
        exchange = self.exchange.seconds(nbytes, profile.world_size, link)
        waits = max(0.0, exchange - min(self.delay, every - 1) * alone)
        return max(alone + self.fragments * waits / every, self.fragments * exchange / every)


SCHEMES: Mapping[str, Scheme] = MappingProxyType(
    {
        "diloco": Scheme(bits=32, exchange=AllReduce()),
        "streaming_diloco": Scheme(bits=4 + 32 / 256, exchange=AllGather(), fragments=4, delay=5),
        "muloco": Scheme(bits=2 + 32 / 512, exchange=AllGather()),
        "sparseloco": Scheme(bits=0.17, exchange=AllGather()),
    }
)
"""The presets of `thinwire.outer_steps`, by name."""


class Way(NamedTuple):
    """A way to train. nbytes, seconds: of a step. more: times as many steps to the same loss as uncompressed training.

    `more` is None where nobody has measured or assumed it.
    """

    name: str
    nbytes: float
    seconds: float
    more: float | None

    @property
    def until(self) -> float:
        """Seconds until the loss that uncompressed training has after 1,000 steps; infinite if not known."""
        return STEPS * self.seconds * (float("inf") if self.more is None else self.more)


def ways(plan: Plan, every: Sequence[int], assumed: Mapping[tuple[str, int], float]) -> list[Way]:
    """Return the ways to train, the one that is there first before the others.

    They are: uncompressed, as planned, and each scheme with each of `every` inner steps. assumed: how many times as
    many steps a scheme takes with so many inner steps, in place of what was measured.
    """
    return sorted([*_each_step(plan), *_apart(plan.profile, every, assumed)], key=lambda way: (way.until, way.seconds))


def _each_step(plan: Plan) -> Iterator[Way]:
    whole = float(sum(row.dense_bytes for row in plan.rows))
    yield Way("uncompressed, each step", whole, plan.dense_seconds, 1.0)
    if plan.pays:
        yield Way("as planned, each step", sum(row.nbytes for row in plan.rows), plan.seconds, _planned(plan))


def _planned(plan: Plan) -> float | None:
    """Return the most steps that one of the plan's candidates costs; None if one was not measured."""
    rows = [measured(name, plan.optimizer) for name in set(plan.choice.values())]
    known = [of_ratio(row.ratio) for row in rows if row is not None]
    return max(known) if len(known) == len(rows) else None


def _apart(profile: Profile, every: Sequence[int], assumed: Mapping[tuple[str, int], float]) -> Iterator[Way]:
    for name, scheme in SCHEMES.items():
        for inner in every:
            more = assumed.get((name, inner), more_steps(name, inner))
            yield Way(f"{name}, H {inner}", scheme.nbytes(profile, inner), scheme.seconds(profile, inner), more)


def trained(profile: Profile) -> int:
    """Return how many parameters take a gradient."""
    return sum(gradient.numel for gradient in profile.timeline.gradients)


class MeasuredApart(NamedTuple):
    """The final loss of a method of outer steps with `every` inner ones, and of uncompressed training.

    Both trained with AdamW at the settings that are best for uncompressed training, and with the same seeds.
    """

    method: str
    every: int
    loss: float
    dense: float

    @property
    def ratio(self) -> float:
        """How many times the uncompressed loss it ends at."""
        return self.loss / self.dense


OUTER_LOSSES: tuple[MeasuredApart, ...] = (
    MeasuredApart("sparseloco", 10, 1.9253, 1.6595),
    MeasuredApart("muloco", 10, 1.7200, 1.6595),
    MeasuredApart("muloco", 30, 1.7678, 1.6595),
    MeasuredApart("diloco", 10, 1.8606, 1.6692),
    MeasuredApart("diloco", 30, 1.8196, 1.6692),
)
"""Of docs/measurements/outer.md, with AdamW inside. Both of `diloco` are means of three seeds."""

BASIS = (
    "Steps to the same loss: from 300 steps of the byte-level GPT, 4 workers, one to three seeds, which are few outer "
    "steps; longer runs and larger models are said to lose less. Give your own with --more-steps, such as "
    "sparseloco:30=1.1."
)
"""Where these figures come from."""

_LOSSES = "2.4135 2.2243 2.1189 2.0257 1.9719 1.9172 1.8698 1.8227 1.7982 1.7672 1.7522 1.7355 1.7115 1.6877 1.6684"
_DENSE = MappingProxyType(dict(zip(range(20, 301, 20), map(float, _LOSSES.split()), strict=True)))
"""Loss by step of uncompressed training, a mean of three seeds."""


def more_steps(method: str, every: int) -> float | None:
    """Return how many times as many steps as uncompressed training this takes to the same loss, or None if unknown.

    Between two H that were measured, the logarithm of the ratio of losses is interpolated over that of H.
    """
    rows = sorted((row.every, row.ratio) for row in OUTER_LOSSES if row.method == method)
    for found, ratio in rows:
        if found == every:
            return of_ratio(ratio)
    for (low, less), (high, more) in pairwise(rows):
        if low < every < high:
            share = math.log(every / low) / math.log(high / low)
            return of_ratio(math.exp(math.log(less) + share * math.log(more / less)))
    return None


def of_ratio(ratio: float) -> float:
    """Return how many times as many steps it takes to the same loss if as many steps end at `ratio` times that loss.

    Uncompressed training had the higher loss some steps before its end: the rest is what the method is behind. Below a
    ratio of 1 it is 1, as that may be luck; above all that was measured, infinite.
    """
    last = max(_DENSE)
    loss = ratio * _DENSE[last]
    for (early, high), (late, low) in pairwise(_DENSE.items()):
        if low <= loss <= high:
            return last / (early + (late - early) * (high - loss) / (high - low))
    return 1.0 if loss < _DENSE[last] else math.inf

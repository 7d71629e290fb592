"""Profiles for the planner's tests, made by hand and at random."""

from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st

from thinwire.exchanges import Link
from thinwire.planner import Bucket, Cost, Curve, Gradient, Profile, Timeline
from thinwire.planner.profile import TRANSPORTS

NOTHING = Curve(((1.0, 0.0),))


def cost(**curves: Curve) -> Cost:
    """A cost of nothing, but for `curves`."""
    return Cost(**dict.fromkeys(("encode", "decode", "each", "exchange", "nbytes"), NOTHING) | curves)


def linear(slope: float, start: float = 0.0) -> Curve:
    """A straight line over sizes."""
    return Curve(((0.0, start), (1e6, start + 1e6 * slope)))


def profile(
    buckets: Mapping[float, list[tuple[str, int]]],
    *,
    link: Link,
    costs: Mapping[str, Cost],
    world_size: int = 4,
    **others: Any,
) -> Profile:
    """Buckets are given by when they are ready; backward ends with the last."""
    made = [
        Bucket(ready=ready, gradients=tuple(Gradient(name=name, numel=numel) for name, numel in gradients))
        for ready, gradients in buckets.items()
    ]
    timeline = Timeline(buckets=tuple(made), computed=max(buckets, default=0.0), rest=others.pop("rest", 0.0))
    return Profile(
        world_size=world_size, timeline=timeline, links=dict.fromkeys(TRANSPORTS, link), costs=costs, **others
    )


_seconds = st.floats(0, 0.1)
_slopes = st.floats(0, 1e-7)
links = st.builds(Link, latency=st.floats(0, 0.01), bandwidth=st.floats(1e4, 1e10))


@st.composite
def costs(draw: st.DrawFn) -> dict[str, Cost]:
    """Costs of four candidates, each summed in a way of its own."""
    return {
        name: cost(
            encode=linear(draw(_slopes), draw(st.floats(0, 1e-3))),
            decode=linear(draw(_slopes), draw(st.floats(0, 1e-3))),
            exchange=linear(draw(_slopes)),
            nbytes=linear(share, 64),
        )
        for name, share in (("fp16", 2.0), ("qsgd", 0.5), ("topk:0.01", 0.08), ("gtopk:0.01", 0.08))
    }


@st.composite
def profiles(draw: st.DrawFn, *, most_buckets: int = 4) -> Profile:
    """Profiles of a few buckets of a few tensors."""
    sizes = draw(
        st.lists(st.lists(st.integers(1, 1_000_000), min_size=1, max_size=3), min_size=1, max_size=most_buckets)
    )
    ready = sorted(draw(st.lists(_seconds, min_size=len(sizes), max_size=len(sizes), unique=True)))
    named = {
        r: [(f"{b}.{i}", n) for i, n in enumerate(bucket)]
        for b, (r, bucket) in enumerate(zip(ready, sizes, strict=True))
    }
    return profile(
        named,
        link=draw(links),
        costs=draw(costs()),
        world_size=draw(st.integers(2, 9)),
        rest=draw(_seconds),
        busy=dict.fromkeys(TRANSPORTS, Link(latency=draw(st.floats(0, 1e-3)), bandwidth=1e9)),
        slowdown=draw(st.floats(0, 3)),
        made=draw(st.sampled_from(({}, {"backend": "gloo"}))),
    )

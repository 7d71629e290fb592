"""The profile of a model and machine as their authors published it. We measured none of it."""

from collections.abc import Sequence

from thinwire.exchanges import Link
from thinwire.planner.profile import TRANSPORTS, Bucket, Cost, Curve, Gradient, Profile, Timeline

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

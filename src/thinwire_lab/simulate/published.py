"""Profiles of models and machines as their authors published them. We measured none of it."""

from collections.abc import Sequence

from thinwire.exchanges import Link
from thinwire.planner.profile import TRANSPORTS, Bucket, Cost, Curve, Gradient, Profile, Timeline

PAIR = 8
"""Bytes of an index and a value."""

LINK = Link(latency=0.0, bandwidth=25e9 / 8)
"""Between the machines of DRAGONN (Wang et al. 2022); their latency is not published."""
XML = 4096 * 30938
"""Elements of its XML model, a single layer."""
COMPUTED = 25e-3
MEASURED = 2**29 / 4
"""Elements of the tensor whose encoding it timed: "512 MB", of tensors whose sizes are powers of two."""


def xml(densities: Sequence[float] = (0.001,), encode: float = 13.2e-3) -> Profile:
    """Return DRAGONN's XML model, where encoding MEASURED elements takes `encode` seconds at any density (their 5.2).

    It has one layer, so its gradient comes at the end of backward, and nothing overlaps.
    """
    names = [
        f"{family}:{density:g}"
        for family in ("sampled_topk", "sampled_doubling", "sampled_gtopk")
        for density in densities
    ]
    return published(XML, COMPUTED, LINK, dict.fromkeys(names, encode * XML / MEASURED))


def published(numel: int, computed: float, link: Link, encode: dict[str, float]) -> Profile:
    """Return the profile of one tensor, ready at the end of backward. `encode`: what each candidate takes to encode.

    Payloads are of 8 bytes an element. Decoding and merging, which are not published, count as free.
    """
    gradient = Gradient(name="all parameters", numel=numel)
    return Profile(
        world_size=1,
        timeline=Timeline(buckets=(Bucket(ready=computed, gradients=(gradient,)),), computed=computed),
        links=dict.fromkeys(TRANSPORTS, link),
        costs={name: _cost(numel, float(name.partition(":")[2]), seconds) for name, seconds in encode.items()},
    )


def _cost(numel: int, density: float, seconds: float) -> Cost:
    free = Curve(((float(numel), 0.0),))
    taken, nbytes = Curve(((float(numel), seconds),)), Curve(((float(numel), PAIR * density * numel),))
    return Cost(encode=taken, decode=free, each=free, exchange=free, nbytes=nbytes)

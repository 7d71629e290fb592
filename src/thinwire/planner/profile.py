"""Profiles: what was measured of a model, a device and a network, in seconds, bytes and bytes per second."""

import json
import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from os import PathLike
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Self, cast, final, get_args

from thinwire.checked import Amount, Bandwidth, Count, Like, Number, Seconds, Size, checked
from thinwire.exchanges import Link, Network, Transport
from thinwire.files import write_atomically
from thinwire.planner.candidates import candidate
from thinwire.planner.reading import built, parsed

SCHEMA = "thinwire.profile/2"
TRANSPORTS: tuple[Transport, ...] = get_args(Transport)
_ALWAYS = ("timeline", "world_size", "links", "busy", "costs")  # what every version saved


@final
@checked
@dataclass(frozen=True, kw_only=True)
class Gradient:
    """A parameter's gradient."""

    name: str
    numel: Size
    itemsize: Count = 4

    @property
    def nbytes(self) -> int:
        """Bytes uncompressed."""
        return self.numel * self.itemsize


@final
@checked
@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Gradients that are exchanged together.

    Args:
        ready: Seconds into the step at which the last of them is computed.
        gradients: Those in the bucket.
    """

    ready: Seconds
    gradients: tuple[Gradient, ...]


@final
@checked
@dataclass(frozen=True, kw_only=True)
class Timeline:
    """A step without communication.

    Args:
        buckets: In the order in which they are exchanged.
        computed: Seconds from the start of forward to the end of backward.
        rest: Seconds after that, for the optimizer.
    """

    buckets: tuple[Bucket, ...]
    computed: Seconds
    rest: Seconds = 0.0

    def __post_init__(self) -> None:
        names = [gradient.name for gradient in self.gradients]
        if len(set(names)) < len(names):
            raise ValueError(f"gradients is {names!r:.200}; expected every name once")

    @property
    def gradients(self) -> list[Gradient]:
        """All gradients, in the order in which they are exchanged."""
        return [gradient for bucket in self.buckets for gradient in bucket.gradients]

    def cut(self, caps: Sequence[int]) -> "Timeline":
        """Return the same gradients in buckets as DDP forms them, in the order they are ready.

        Args:
            caps: The maximum bytes of each bucket. The last one applies to all further buckets.
        """
        buckets: list[Bucket] = []
        for each in sorted(self.buckets, key=lambda bucket: bucket.ready):
            full = caps[min(len(buckets), len(caps)) - 1] if buckets else 0
            if not buckets or sum(gradient.nbytes for gradient in buckets[-1].gradients) >= full:
                buckets.append(each)
            else:
                buckets[-1] = Bucket(ready=each.ready, gradients=(*buckets[-1].gradients, *each.gradients))
        return replace(self, buckets=tuple(buckets))


@final
@checked
@dataclass(frozen=True)
class Curve:
    """A function of size: straight lines through points, never falling.

    Below the first point it keeps that point's value, as every call has a cost of its own. Beyond the last point it
    keeps the last slope; with a single point it is proportional to size.

    Args:
        points: (size, value), from the smallest size on.

    Raises:
        ValueError: Unless sizes ascend, and values are non-negative and non-decreasing.
    """

    points: tuple[tuple[Number, Number], ...]

    def __post_init__(self) -> None:
        sizes, values = zip(*self.points, strict=True) if self.points else ((), ())
        ascend = list(sizes) == sorted(set(sizes)) and list(values) == sorted(values)
        if not (sizes and ascend and 0 <= values[0] <= values[-1] < math.inf):
            raise ValueError(
                f"points are {self.points}; expected ascending sizes with non-negative, non-decreasing values"
            )

    @classmethod
    @checked
    def through(cls, points: Iterable[tuple[Number, Number]]) -> Self:
        """Return the curve through measured points. A point below the one before is lifted to its value."""
        risen: list[tuple[float, float]] = []
        for size, value in sorted(points):
            risen.append((float(size), max(float(value), risen[-1][1] if risen else 0.0)))
        return cls(tuple(risen))

    def __call__(self, size: float) -> float:
        """Return the value at `size`."""
        right = bisect_right(self.points, size, key=lambda point: point[0])
        if right == 0:
            return self.points[0][1]
        if len(self.points) == 1:
            return self.points[0][1] * size / max(self.points[0][0], 1.0)
        (x0, y0), (x1, y1) = self.points[min(right, len(self.points) - 1) - 1 :][:2]
        return y0 + (y1 - y0) * (size - x0) / (x1 - x0)


@final
@checked
@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a candidate costs, as curves over the number of elements in the tensor.

    Args:
        encode, decode: Seconds, with `world_size` payloads to decode.
        each: Extra seconds to decode for each further rank.
        exchange: Seconds the exchange takes beyond its messages.
        nbytes: Bytes of one payload.
    """

    encode: Curve
    decode: Curve
    each: Curve
    exchange: Curve
    nbytes: Curve


@final
@checked
@dataclass(frozen=True, kw_only=True)
class Island:
    """Ranks near each other, and the link among them; a profile's `made` has it, if there are any."""

    ranks: Count
    latency: Seconds
    bandwidth: Bandwidth

    @property
    def link(self) -> Link:
        """Return the link."""
        return Link(latency=self.latency, bandwidth=self.bandwidth)

    @classmethod
    def of(cls, made: Mapping[str, Any]) -> Self | None:
        """Return what `made` has of it, or None. Raises ValueError if that makes no sense."""
        if "island" not in made:
            return None
        found = cast(Self, built(cls, made["island"], "made.island"))
        check_carries(found.link, "made.island")
        return found


def check_carries(link: Link, at: str) -> None:
    """Raise ValueError, which names the link, unless it has bandwidth."""
    if not link.bandwidth:
        raise ValueError(f"{at}.bandwidth is {link.bandwidth}; expected more than 0 bytes per second: measure anew")


@final
@checked
@dataclass(frozen=True, kw_only=True)
class Profile:
    """What a plan needs to know about a model, a device and a network.

    Args:
        world_size: The number of ranks.
        timeline: The step without communication.
        links: Per transport, fitted to measured times.
        busy: Per transport, fitted to the processor seconds of one rank.
        unseen: For each transport whose bandwidth could not be separated from its latency: the largest message sent, in
            bytes. Its link gets the lowest bandwidth that fits.
        costs: By candidate.
        gathers: By name, of parameters' gathers: over the elements of a rank's shard, decoding everybody's.
        slowdown: Seconds by which a processor second of communication delays computing that overlaps it; 0 where
            nothing competes for cores, as on a GPU.
        tiers: A description of the network's tiers, for printing.
        made: How, when and on what it was measured.

    Raises:
        ValueError: For impossible numbers and for a missing transport.
    """

    world_size: Count
    timeline: Timeline
    links: Mapping[Transport, Annotated[Link, Like(Network)]]
    busy: Mapping[Transport, Link] = field(default_factory=dict)
    unseen: Mapping[Transport, Size] = field(default_factory=dict)
    costs: Mapping[str, Cost] = field(default_factory=dict)
    gathers: Mapping[str, Cost] = field(default_factory=dict)
    slowdown: Amount = 0.0
    tiers: Sequence[str] = ()
    made: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_made(self.made)
        for name in self.costs:
            candidate(name)  # raises for one of another version
        if missing := [transport for transport in TRANSPORTS if transport not in self.links]:
            raise ValueError(f"links lack {missing[0]}; expected {', '.join(TRANSPORTS)}")
        for of, links in (("links", self.links), ("busy", self.busy)):
            for transport, link in links.items():
                if isinstance(link, Link):
                    check_carries(link, f"{of}.{transport}")

    def on(self, link: Link | None = None, *, world_size: int | None = None) -> Self:
        """Return the same profile on another link, or with `world_size` ranks.

        Latency is never below the measured one, and no message is faster than this machine's processors can send.
        """
        links, unseen = self.links, self.unseen
        if link is not None:
            unseen = {t: size for t, size in unseen.items() if self.links[t].bandwidth < link.bandwidth}
            links = {t: self._limited(t, link) for t in TRANSPORTS}
        known = self.world_size if world_size is None else world_size
        return replace(self, links=links, unseen=unseen, world_size=known)

    def _limited(self, transport: Transport, link: Link) -> Link:
        measured, busy = self.links[transport], self.busy.get(transport)
        fastest = max(measured.bandwidth, busy.bandwidth if busy else 0.0)
        return Link(latency=max(measured.latency, link.latency), bandwidth=min(fastest, link.bandwidth))

    def to_json(self) -> str:
        """Return the profile as JSON, which `from_json` reads."""
        return json.dumps({"schema": SCHEMA, **asdict(self)}, indent=1)

    @classmethod
    @checked
    def from_json(cls, text: str) -> Self:
        """Return the profile in a text that `to_json` wrote.

        Raises:
            ValueError: If the text is something else. It names the field, and what was expected there.
        """
        try:
            raw = parsed(text)
        except (RecursionError, ValueError) as error:
            raise ValueError(f"this is not a thinwire profile: {error}; expected JSON") from error
        schema = raw.pop("schema", None) if isinstance(raw, dict) else None
        if schema != SCHEMA:
            raise ValueError(f"this is not a thinwire profile: its schema is {schema!r:.200}; expected {SCHEMA!r}")
        if lacking := [name for name in _ALWAYS if name not in raw]:
            raise ValueError(f"the profile lacks {lacking[0]!r}; expected {', '.join(_ALWAYS)}")
        return cast(Self, built(cls, raw, ""))

    @checked
    def save(self, path: str | PathLike[str]) -> None:
        """Write it to the file `path`, as JSON; if that is interrupted, what was there before stays."""
        write_atomically(Path(path), self.to_json() + "\n")

    @classmethod
    @checked
    def load(cls, path: str | PathLike[str]) -> Self:
        """Return the profile in a file, `path`, that `save` wrote.

        Raises:
            ValueError: If the file has something else. It names the file.
        """
        try:
            return cls.from_json(Path(path).read_text())
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error


@checked
def _facts(
    *,
    world_size: Count = 1,
    backend: str = "",
    device: str = "",
    link: str = "",
    model: str = "",
    measuring_seconds: Seconds = 0.0,
    settings: Sequence[str] = (),
    island: Mapping[str, Any] = MappingProxyType({}),
    script: Mapping[str, Any] = MappingProxyType({}),
    **others: Any,
) -> None:
    """Check what is read of how a profile was made."""


def _check_made(made: Mapping[str, Any]) -> None:
    try:
        _facts(**made)
    except (TypeError, ValueError) as error:
        raise ValueError(f"made.{error}") from error
    Island.of(made)

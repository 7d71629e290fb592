"""A step played through: backward, encoding, the wire and decoding, each waiting for what it needs."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

from thinwire.planner.candidates import Candidate, candidate
from thinwire.planner.profile import Bucket, Cost, Gradient, Profile


@final
@dataclass(frozen=True, kw_only=True)
class Work:
    """What tensors of one bucket that share a candidate cost: seconds of each stage, and what the wire carries.

    `busy` are seconds by which the exchange delays computing that it overlaps.
    """

    name: str
    gradients: tuple[Gradient, ...]
    nbytes: float
    encode: float
    exchange: float
    decode: float
    busy: float


class State(NamedTuple):
    """How far a step is: what computing is late, and until when the wire and decoding are taken."""

    late: float = 0.0
    wire: float = 0.0
    decoded: float = 0.0


class Span(NamedTuple):
    """Something that took its time, for drawing: seconds into the step, on the track "compute", "wire" or "decode".

    label: on "compute" what is done ("compute", "encode", or "slowed" by the messages of others), else the candidate.
    """

    track: str
    label: str
    start: float
    end: float


def work(name: str, gradients: Iterable[Gradient], profile: Profile) -> Work:
    """Return what it costs to exchange `gradients` of one bucket by the candidate of that name, as one payload."""
    mine, world_size = tuple(gradients), profile.world_size
    found = candidate(name)
    cost = profile.costs.get(name)
    whole = float(sum(g.nbytes for g in mine))
    nbytes = sum(_payload_bytes(found, cost, g) for g in mine) if cost else whole
    exchange = messages(found, nbytes, whole, profile)
    encode = decode = more = 0.0
    if cost:
        further = world_size - profile.made.get("world_size", world_size)
        encode = sum(cost.encode(g.numel) for g in mine)
        decode = sum(max(0.0, cost.decode(g.numel) + further * cost.each(g.numel)) for g in mine)
        more = _rounds(found, profile) * sum(cost.exchange(g.numel) for g in mine)
    busy = profile.slowdown * (messages(found, nbytes, whole, profile, busy=True) + more)
    return Work(
        name=name,
        gradients=mine,
        nbytes=nbytes,
        encode=encode,
        exchange=exchange + more,
        decode=decode,
        busy=min(busy, exchange + more),
    )


def _payload_bytes(found: Candidate, cost: Cost, gradient: Gradient) -> float:
    """Return the bytes of a payload; costs are of float32, and what is picked travels in the gradient's own dtype."""
    wider = (gradient.itemsize - 4) * found.density * gradient.numel
    return min(gradient.nbytes + 64.0, max(0.0, cost.nbytes(gradient.numel) + wider))


def messages(found: Candidate, nbytes: float, whole: float, profile: Profile, *, busy: bool = False) -> float:
    """Return the seconds of an exchange's messages, or those of a processor for them."""
    links = profile.busy if busy else profile.links
    link = links.get(found.exchange.transport)
    return 0.0 if link is None else found.exchange.seconds(nbytes, profile.world_size, link, max(nbytes, whole))


def _rounds(found: Candidate, profile: Profile) -> float:
    """Return how many rounds the exchange takes in proportion to those when it was measured."""
    then = profile.made.get("world_size", profile.world_size)
    rounds = [len(found.exchange.hops(1.0, world)) if world > 1 else 0 for world in (profile.world_size, then)]
    return rounds[0] / rounds[1] if rounds[1] else 0.0


def passed(state: State, ready: float, works: Sequence[Work]) -> State:
    """Return the state after a bucket that is `ready` then, were nothing late."""
    late, wire, decoded = state
    for part in works:
        late += part.encode
        wire = max(ready + late, wire) + part.exchange
        decoded = max(wire, decoded) + part.decode
        late += part.busy  # whenever it starts: a faster link must not cost time
    return State(late, wire, decoded)


def finished(state: State, profile: Profile) -> float:
    """Return when a step is over that is in this state after its last bucket."""
    timeline = profile.timeline
    return max(timeline.computed + state.late, state.wire, state.decoded) + timeline.rest


def works(bucket: Bucket, choice: Mapping[str, str], profile: Profile) -> list[Work]:
    """Return the work of a bucket: one piece for each candidate that is chosen for some of its gradients."""
    groups: dict[str, list[Gradient]] = {}
    for gradient in bucket.gradients:
        groups.setdefault(choice.get(gradient.name, "dense"), []).append(gradient)
    return [work(name, mine, profile) for name, mine in sorted(groups.items(), key=lambda item: item[0] == "dense")]


def step_seconds(profile: Profile, choice: Mapping[str, str] | str = "dense") -> float:
    """Predict the seconds of a step with a candidate's name per parameter ("dense" if left out), or one for all."""
    state = State()
    for bucket in profile.timeline.buckets:
        state = passed(state, bucket.ready, works(bucket, _each(choice, bucket), profile))
    return finished(state, profile)


def spans(profile: Profile, choice: Mapping[str, str] | str = "dense") -> list[Span]:
    """Return what a step is spent on up to `rest`: the last of it ends that long before `step_seconds`.

    A "compute" span ends where a bucket is ready.
    """
    state, reached, computed = State(), 0.0, profile.timeline.computed
    found: list[Span] = []
    for bucket in profile.timeline.buckets:
        found.append(Span("compute", "compute", reached + state.late, bucket.ready + state.late))
        reached = bucket.ready
        for part in works(bucket, _each(choice, bucket), profile):
            after = passed(state, reached, (part,))
            found += _parts(part, reached, state, after)
            state = after
    found.append(Span("compute", "compute", reached + state.late, computed + state.late))
    return [span for span in found if span.end > span.start]


def _parts(part: Work, ready: float, before: State, after: State) -> list[Span]:
    encoded = ready + before.late + part.encode
    return [
        Span("compute", "encode", ready + before.late, encoded),
        Span("compute", "slowed", encoded, ready + after.late),
        Span("wire", part.name, after.wire - part.exchange, after.wire),
        Span("decode", part.name, after.decoded - part.decode, after.decoded),
    ]


def _each(choice: Mapping[str, str] | str, bucket: Bucket) -> Mapping[str, str]:
    return dict.fromkeys((g.name for g in bucket.gradients), choice) if isinstance(choice, str) else choice

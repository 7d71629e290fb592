"""Predicting a step: backward, encoding, the wire and decoding, where each waits for what it needs."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, final

from thinwire.checked import checked
from thinwire.planner.candidates import Candidate, candidate
from thinwire.planner.profile import Bucket, Cost, Gradient, Profile

_IN_FLIGHT: Mapping[tuple[object, str], float] = MappingProxyType(
    {("gloo", "all_reduce"): 2, ("gloo", "all_gather"): math.inf}
)
"""How many exchanges are under way at once: torch works on two collectives of Gloo's, and we send what is gathered as
soon as it is there. Others wait for each other."""


@final
@dataclass(frozen=True, kw_only=True)
class Work:
    """What tensors of a bucket and candidate cost; the exchange `holds` up the next one, and computing is `busy`."""

    name: str
    nbytes: float
    encode: float
    exchange: float
    holds: float
    decode: float
    busy: float


class State(NamedTuple):
    """Where is the step? Seconds by which computing is late, and until which the wire and decoding are busy."""

    late: float = 0.0
    wire: float = 0.0
    decoded: float = 0.0


def work(name: str, gradients: Iterable[Gradient], profile: Profile) -> Work:
    """Return the cost of exchanging `gradients` of one bucket as one payload of the named candidate."""
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
    way = profile.made.get("backend"), found.exchange.transport
    trips = messages(found, 0.0, whole, profile)  # those of several exchanges overlap; their bytes share the wire
    busy = profile.slowdown * (messages(found, nbytes, whole, profile, busy=True) + more)
    return Work(
        name=name,
        nbytes=nbytes,
        encode=encode,
        exchange=exchange + more,
        holds=exchange + more - trips * (1 - 1 / _IN_FLIGHT.get(way, 1)),
        decode=decode,
        busy=min(busy, exchange + more),
    )


def _payload_bytes(found: Candidate, cost: Cost, gradient: Gradient) -> float:
    """Return the bytes of a payload. Costs are of float32, and values that are picked keep the gradient's dtype."""
    wider = (gradient.itemsize - 4) * found.density * gradient.numel
    return min(gradient.nbytes + 64.0, max(0.0, cost.nbytes(gradient.numel) + wider))


def messages(found: Candidate, nbytes: float, whole: float, profile: Profile, *, busy: bool = False) -> float:
    """Return the seconds of an exchange's messages or, with `busy`, the processor seconds they take."""
    links = profile.busy if busy else profile.links
    link = links.get(found.exchange.transport)
    return 0.0 if link is None else found.exchange.seconds(nbytes, profile.world_size, link, max(nbytes, whole))


def _rounds(found: Candidate, profile: Profile) -> float:
    """Return the exchange's number of rounds, relative to when it was measured."""
    then = profile.made.get("world_size", profile.world_size)
    rounds = [len(found.exchange.hops(1.0, world)) if world > 1 else 0 for world in (profile.world_size, then)]
    return rounds[0] / rounds[1] if rounds[1] else 0.0


def passed(state: State, ready: float, works: Sequence[Work]) -> State:
    """Return the state after a bucket that would be `ready` at that second if nothing were late."""
    late, wire, decoded = state
    for part in works:
        late += part.encode
        start = max(ready + late, wire)
        wire = start + part.holds
        decoded = max(start + part.exchange, decoded) + part.decode
        late += part.busy  # the same whenever it starts: a faster link must not cost time
    return State(late, wire, decoded)


def finished(state: State, profile: Profile) -> float:
    """The step is in this state after its last bucket: when does it end, in seconds?"""
    timeline = profile.timeline
    return max(timeline.computed + state.late, state.wire, state.decoded) + timeline.rest


def works(bucket: Bucket, choice: Mapping[str, str], profile: Profile) -> list[Work]:
    """Return the work of a bucket: one for each candidate chosen for some of its gradients, "dense" last."""
    groups: dict[str, list[Gradient]] = {}
    for gradient in bucket.gradients:
        groups.setdefault(choice.get(gradient.name, "dense"), []).append(gradient)
    return [work(name, mine, profile) for name, mine in sorted(groups.items(), key=lambda item: item[0] == "dense")]


@checked
def step_seconds(profile: Profile, choice: Mapping[str, str] | str = "dense") -> float:
    """Predict the seconds of a step.

    Args:
        profile: The profile of the model, the device and the network.
        choice: A candidate's name per parameter, "dense" if missing, or one for all.

    Returns:
        Seconds from the start of the forward pass to the end of the optimizer's step.
    """
    state = State()
    for bucket in profile.timeline.buckets:
        mine = dict.fromkeys((g.name for g in bucket.gradients), choice) if isinstance(choice, str) else choice
        state = passed(state, bucket.ready, works(bucket, mine, profile))
    return finished(state, profile)


def check_finite(seconds: float, name: str) -> None:
    """Raise ValueError unless a step with the named candidate takes a finite time."""
    if not math.isfinite(seconds):
        raise ValueError(
            f"by this profile a step with {name} takes {seconds} s; expected a finite time: measure anew, or mend its "
            "latencies, bandwidths and costs"
        )

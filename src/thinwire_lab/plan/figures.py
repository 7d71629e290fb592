"""What plots draw: what a step spends its time on, and the least compression that pays."""

import math
from collections.abc import Mapping
from typing import Annotated, NamedTuple

from thinwire.checked import Range, checked
from thinwire.planner import Profile
from thinwire.planner.timeline import State, Work, passed, works

Throughput = Annotated[
    float, Range("bytes per second, above 0 (math.inf for what costs nothing)", above=0, most=math.inf)
]


class Span(NamedTuple):
    """A bar to draw, from `start` to `end` seconds into the step. `track` is "compute", "wire" or "decode".

    label: the candidate; on "compute" the kind of work: "compute", "encode", or "slowed" by messages.
    """

    track: str
    label: str
    start: float
    end: float


def spans(profile: Profile, choice: Mapping[str, str]) -> list[Span]:
    """What does a step spend its time on? `rest` is left out: the last span ends that long before `step_seconds`.

    A "compute" span ends where a bucket is ready. Exchanges in flight at once are drawn one after the other.
    """
    state, reached, arrived, computed = State(), 0.0, 0.0, profile.timeline.computed
    found: list[Span] = []
    for bucket in profile.timeline.buckets:
        found.append(Span("compute", "compute", reached + state.late, bucket.ready + state.late))
        reached = bucket.ready
        for part in works(bucket, choice, profile):
            after = passed(state, reached, (part,))
            found += _parts(part, reached, state, after, arrived)
            state, arrived = after, max(arrived, found[-2].end)
    found.append(Span("compute", "compute", reached + state.late, computed + state.late))
    return [span for span in found if span.end > span.start]


def _parts(part: Work, ready: float, before: State, after: State, arrived: float) -> list[Span]:
    encoded = ready + before.late + part.encode
    sent = max(encoded, before.wire)
    return [
        Span("compute", "encode", ready + before.late, encoded),
        Span("compute", "slowed", encoded, ready + after.late),
        Span("wire", part.name, max(sent, arrived), sent + part.exchange),
        Span("decode", part.name, after.decoded - part.decode, after.decoded),
    ]


@checked
def minimum_ratio(
    network: Throughput, *, convert: Throughput, transform: Throughput, pack: Throughput, select: Throughput
) -> float:
    """Return the least compression ratio that saves time (Wang et al. 2020, Equation 4); infinite if none does.

    The ratio is of uncompressed to compressed bytes. All arguments are throughputs in bytes per second: of the network,
    of conversion to 16 bits (T_m), of the Fourier transform (T_f), of packing (T_p) and of selection (T_s). Then
    k > 1 / (1 − 2·T_comm·(2/T_m + 1/T_f + 1/T_p + 1/T_s)), as sender and receiver each make every pass once. Raises
    ValueError unless all are above 0.
    """
    passes = 2 / convert + 1 / transform + 1 / pack + 1 / select
    left = 1 - 2 * network * passes if passes else 1.0
    return 1 / left if left > 0 else math.inf

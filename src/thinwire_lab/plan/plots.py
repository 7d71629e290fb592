"""A plan as a figure: the step as a timeline."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from thinwire.planner import Plan, Profile, step_seconds
from thinwire.planner.timeline import State, Work, passed, works
from thinwire_lab.show.canvas import FAINT, INK, MUTED, PARTS, blank, legend, name, restrain


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


_TRACKS = ("compute", "wire", "decode")
_SLOWED, _UPDATE, _COMPRESSED = "#E8DCC0", "#9AA3AE", "#0B7A5B"
_COLOURS = {"compute": PARTS["compute"], "encode": PARTS["encode"], "slowed": _SLOWED, "update": _UPDATE}
_SAID = {
    "compute": "forward and backward",
    "encode": "encode",
    "slowed": "slowed by messages",
    "dense": "uncompressed on the wire",
    "compressed": "compressed on the wire",
    "decode": "decode",
    "update": "optimizer",
}


def timeline(plan: Plan) -> Figure:
    """Draw a step on one time axis: uncompressed above, as planned below."""
    figure = blank((10.5, 4.6))
    upper = figure.add_subplot(2, 1, 1)
    lower = figure.add_subplot(2, 1, 2, sharex=upper)
    used = _step(upper, plan.profile, {}) | _step(lower, plan.profile, plan.choice)
    upper.set_xlim(0, 1e3 * 1.02 * max(plan.dense_seconds, plan.seconds) or 1.0)
    name(upper, f"Uncompressed: {1e3 * plan.dense_seconds:.1f} ms", "")
    name(lower, f"As planned: {1e3 * plan.seconds:.1f} ms", "milliseconds into the step; a triangle where a bucket is")
    lower.set_xlabel(f"{lower.get_xlabel()} ready", fontsize=9.5, color=MUTED)
    handles = [Patch(color=_colour(kind)) for kind in _SAID if kind in used]
    legend(figure, handles, [_SAID[kind] for kind in _SAID if kind in used], columns=4)
    return figure


def _step(axes: Axes, profile: Profile, choice: Mapping[str, str]) -> set[str]:
    """Draw one step, and return the kinds of work in it."""
    drawn = spans(profile, choice)
    total = step_seconds(profile, choice)
    drawn.append(Span("compute", "update", total - profile.timeline.rest, total))
    for span in drawn:
        bar = (1e3 * span.start, 1e3 * (span.end - span.start))
        axes.broken_barh(
            [bar],
            (_TRACKS.index(span.track) - 0.36, 0.72),
            color=_colour(_kind(span)),
            edgecolor="white",
            linewidth=0.3,
        )
    for at in _ready(drawn, profile):
        axes.plot(1e3 * at, -0.48, "v", color=INK, markersize=4)
    axes.axvline(1e3 * total, color=INK, linewidth=1)
    axes.set_yticks(range(len(_TRACKS)), _TRACKS)
    axes.set_ylim(len(_TRACKS) - 0.5, -0.6)
    restrain(axes)
    axes.grid(axis="x", color=FAINT, linewidth=0.8)
    return {_kind(span) for span in drawn if span.end > span.start}


def _ready(drawn: Sequence[Span], profile: Profile) -> list[float]:
    """When are buckets ready? Whenever a stretch of computing ends, except one after the last bucket."""
    ends = [span.end for span in drawn if span.label == "compute"]
    buckets = profile.timeline.buckets
    return ends if buckets and buckets[-1].ready == profile.timeline.computed else ends[:-1]


def _kind(span: Span) -> str:
    kinds = {"compute": span.label, "wire": "dense" if span.label == "dense" else "compressed", "decode": "decode"}
    return kinds[span.track]


def _colour(kind: str) -> str:
    return {**_COLOURS, "dense": PARTS["exchange"], "compressed": _COMPRESSED, "decode": PARTS["decode"]}[kind]

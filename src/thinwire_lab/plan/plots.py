"""A plan as figures: the step as a timeline, and the least compression that pays."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, NullFormatter

from thinwire.checked import Range, checked
from thinwire.planner import Plan, Profile, step_seconds
from thinwire.planner.timeline import State, Work, passed, works
from thinwire_lab.plan.words import bit_rate
from thinwire_lab.show.canvas import COLOURS, FAINT, INK, MUTED, PARTS, blank, legend, name, restrain

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
_LEAST, _MOST = 1e6, 1e10  # bytes per second, between which ratios are drawn
_HIGHEST = 1e3  # ratio
_PAPER_END = 22e9 / 8  # bytes per second above which no ratio pays, as in the text
_PAPER = {
    "select": 12e9,
    "pack": 34e9,
    "convert": math.inf,
    "transform": 1 / (1 / (2 * _PAPER_END) - 1 / 12e9 - 1 / 34e9),  # not told; what makes it end there
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


class Passes(NamedTuple):
    """A candidate on the largest tensor: its compression ratio, and the bytes per second it encodes and decodes."""

    name: str
    ratio: float
    encode: float
    decode: float

    def least(self, network: float) -> float:
        """Return the least ratio that pays. Each end has one throughput here; in Eq. 4 both ends do every pass."""
        return minimum_ratio(
            network, convert=math.inf, transform=math.inf, select=2 * self.encode, pack=2 * self.decode
        )

    @property
    def end(self) -> float:
        """The network's bytes per second above which no ratio pays."""
        return 1 / (1 / self.encode + 1 / self.decode)

    @property
    def limit(self) -> float:
        """The network's bytes per second up to which the candidate's own ratio pays."""
        return (1 - 1 / self.ratio) * self.end


def passes(profile: Profile) -> Iterator[Passes]:
    """Yield each candidate that was measured and sends less."""
    largest = max(profile.timeline.gradients, key=lambda g: g.numel)
    for candidate, cost in profile.costs.items():
        took = [max(curve(largest.numel), 1e-9) for curve in (cost.encode, cost.decode)]
        ratio = largest.nbytes / max(1.0, cost.nbytes(largest.numel))
        if ratio > 1:
            yield Passes(candidate, ratio, *(largest.nbytes / seconds for seconds in took))


def least_ratio(profile: Profile) -> Figure:
    """The least ratio that pays over the network's throughput (Wang et al. 2020, Eq. 4 and Fig. 10)."""
    figure = blank((7.5, 5.2))
    axes = figure.add_subplot()
    measured = list(passes(profile))
    for found, colour in zip(measured, COLOURS * len(measured), strict=False):
        points = sorted({*_networks(found.end), found.limit})
        label = f"{found.name}: sends 1/{found.ratio:.3g}"
        ratios = [found.least(network) for network in points]
        axes.plot(points, ratios, "-o", color=colour, label=label, markevery=[points.index(found.limit)])
    points = _networks(_PAPER_END)
    paper = [minimum_ratio(network, **_PAPER) for network in points]
    axes.plot(points, paper, "--", color=MUTED, linewidth=1.4, label="the paper's GPU, Fig. 10a")
    here = profile.links["all_reduce"].bandwidth
    if _LEAST <= here <= _MOST:
        axes.axvline(here, color=INK, linewidth=1, label=f"this network, {bit_rate(here)}")
    _scale(axes)
    name(axes, "The least compression that pays", "throughput of the network")
    legend(figure, *axes.get_legend_handles_labels(), columns=3)
    return figure


def _networks(end: float) -> list[float]:
    """Return network throughputs, dense near `end`, where the least ratio rises to infinity."""
    above_one = [10 ** (power / 20) for power in range(-120, 80)]
    return [end * more / (1 + more) for more in above_one]


def _scale(axes: Axes) -> None:
    restrain(axes)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(_LEAST, _MOST)
    axes.set_ylim(1, _HIGHEST)
    axes.set_xticks([10.0**power / 8 for power in range(7, 11)] + [1e10 / 8 * 5.6])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda bandwidth, _: bit_rate(bandwidth)))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda ratio, _: f"{ratio:g}"))
    axes.set_ylabel("uncompressed over compressed bytes", fontsize=9.5, color=MUTED)
    axes.grid(color=FAINT, linewidth=0.8)


CAPTION = (
    "Wang et al. 2020, Eq. 4: k > 1 / (1 - 2 T_comm (2/T_m + 1/T_f + 1/T_p + 1/T_s)). For a candidate, T_s is twice "
    "the bytes per second at which it encodes the largest tensor here, and T_p twice those at which it decodes it, as "
    "one end encodes and the other decodes; conversion and transform (T_m, T_f) are part of that. "
    "A dot: up to there the candidate's own ratio pays. Dashed: T_s = 12 GB/s and T_p = 34 GB/s, and as much for T_m "
    "and T_f, which the paper does not tell, as leaves no ratio above 22 Gbit/s. The formula knows no latency, no "
    "number of workers and no overlap with backward; the plan does."
)

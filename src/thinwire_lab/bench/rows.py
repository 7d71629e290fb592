"""From a worker's events to a row of the table."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean, median, quantiles, stdev
from typing import Any

from thinwire_lab.bench.results import Memory, Point, Process, Quantiles, Row, Setting, Split, Spread, WireBytes

HEADER_BYTES = 66
"""Ethernet 14, IPv4 20, TCP with timestamps 32: what each packet adds."""

Event = Mapping[str, Any]


@dataclass
class Record:
    """Collects the events of one row."""

    setting: Setting
    steps: int
    skip: int
    _steps: list[Event] = field(default_factory=list)
    _losses: list[Event] = field(default_factory=list)
    _done: dict[str, Any] = field(default_factory=dict)

    def add(self, event: Event) -> None:
        """Add a "step", "tail", "loss" or "done" event."""
        takers: dict[str, Callable[[Event], None]] = {"step": self._steps.append, "loss": self._losses.append}
        takers |= {"tail": self._tail, "done": self._done.update}
        takers[event["kind"]](event)

    def step_seconds(self) -> list[float]:
        """Return the seconds of the steps that count: those after the first `skip`, up to `steps`.

        Of outer steps, means over the inner steps from one to the next.
        """
        return [event["total"] for event in self._counted()]

    def curve(self) -> tuple[tuple[float, float, float], ...]:
        """Return (seconds, bytes, held-out loss) for each time the loss was taken."""
        return tuple((event["seconds"], event["bytes"], event["loss"]) for event in self._losses)

    def protocol_overhead(self) -> float | None:
        """Return the bytes of packet headers over the declared bytes, if packets were counted."""
        counted = [event for event in self._counted() if "packets" in event]
        declared = sum(event["sent_bytes"] for event in counted)
        return HEADER_BYTES * sum(event["packets"] for event in counted) / declared if declared else None

    def row(self, *, dense: Row | None, target: float | None) -> Row:
        """Return the row; `dense` is the uncompressed row if there is one."""
        seconds = percentiles(self.step_seconds())
        measured = [event["measured"] for event in self._counted() if "measured" in event]
        final = next(event["loss"] for event in self._losses if event["step"] == self.steps)
        target = final if target is None and self.setting.is_dense else target
        return Row(
            **vars(self.setting),
            steps=self.steps,
            step_seconds=seconds,
            split_seconds=self._split(seconds),
            wire_bytes_per_step=WireBytes(
                measured=fmean(measured) if measured else None,
                declared=fmean(event["sent_bytes"] for event in self._counted()),
                dense=fmean(event["dense_bytes"] for event in self._counted()),
            ),
            loss_curve=self.curve(),
            final_loss=final,
            seconds_to_target=None
            if target is None
            else first_at(target, [(at, loss) for at, _, loss in self.curve()]),
            speedup_vs_dense=dense.step_seconds.p50 / seconds.p50 if dense else 1.0 if self.setting.is_dense else None,
            replicas_identical=not self._done.get("different"),
            outer_exchange_seconds=self._outer_exchange(),
            waited_for=tuple(map(tuple, self._done["waited_for"])) if "waited_for" in self._done else None,
            memory=Memory(**self._done["memory"]) if "memory" in self._done else None,
            process=Process(**self._done["process"]) if "process" in self._done else None,
        )

    def _counted(self) -> list[Event]:
        kept = [event for event in self._steps if self.skip <= event["step"] < self.steps]
        return _rounds(kept, self.setting.outer) if self.setting.outer else kept

    def _outer_exchange(self) -> float | None:
        """Return the median of what was waited in the inner steps from one outer step to the next."""
        waited = [self.setting.outer * event["waited"] for event in self._counted() if "waited" in event]
        return median(waited) if waited else None

    def _split(self, seconds: Quantiles) -> Split:
        """Return the mean split of the steps between the 20th and the 80th percentile: it adds up to a typical step."""
        typical = [event for event in self._counted() if seconds.p20 <= event["total"] <= seconds.p80]
        return Split(**{part: fmean(event[part] for event in typical or self._counted()) for part in _PARTS})

    def _tail(self, event: Event) -> None:
        if self._steps and "measured" in event:
            last = self._steps[-1]
            self._steps[-1] = {**last, **{key: last[key] + event[key] for key in ("measured", "packets")}}


def _rounds(steps: Sequence[Event], length: int) -> list[Event]:
    """Return the mean of each whole round of so many steps; if there is none, that of all."""
    rounds: dict[int, list[Event]] = {}
    for event in steps:
        rounds.setdefault(event["step"] // length, []).append(event)
    whole = [each for each in rounds.values() if len(each) == length] or [list(steps)]
    numbers = [[key for key in each[0] if key != "kind" and all(key in event for event in each)] for each in whole]
    return [{k: fmean(event[k] for event in each) for k in of} for each, of in zip(whole, numbers, strict=True)]


_PARTS = ("compute", "encode", "exchange", "decode")


def percentiles(values: Sequence[float]) -> Quantiles:
    """Return the 20th, 50th and 80th percentile of at least one value."""
    if len(values) == 1:
        return Quantiles(p20=values[0], p50=values[0], p80=values[0])
    tenths = quantiles(values, n=10, method="inclusive")
    return Quantiles(p20=tenths[1], p50=tenths[4], p80=tenths[7])


def first_at(target: float, curve: Iterable[tuple[float, float]]) -> float | None:
    """Return when the loss first is `target`, between two points (when, loss) if need be; None if it never is."""
    before = None
    for when, loss in curve:
        if loss <= target:
            if before is None:
                return when
            return before[0] + (when - before[0]) * (before[1] - target) / (before[1] - loss)
        before = (when, loss) if math.isfinite(loss) else before
    return None


def merged(runs: Sequence[Row], seeds: Sequence[int], *, dense: Row | None) -> Row:
    """Return the row of all `runs`, one for each of `seeds`. `dense`: the uncompressed row, if it has been run.

    Of the loss curves, those points count that every run has. A time to the target is the median over the runs; if half
    of them or more never got there, there is none.
    """
    points = list(zip(*(run.loss_curve for run in runs), strict=False))
    seconds = Quantiles(**_medians(asdict(run.step_seconds) for run in runs))
    return replace(
        runs[0],
        step_seconds=seconds,
        split_seconds=Split(**_medians(asdict(run.split_seconds) for run in runs)),
        wire_bytes_per_step=WireBytes(**_medians(asdict(run.wire_bytes_per_step) for run in runs)),
        loss_curve=tuple(map(_middle, points)),
        final_loss=fmean(run.final_loss for run in runs),
        seconds_to_target=_median_or_never([run.seconds_to_target for run in runs]),
        speedup_vs_dense=dense.step_seconds.p50 / seconds.p50 if dense else runs[0].speedup_vs_dense,
        outer_exchange_seconds=_median_or_never([run.outer_exchange_seconds for run in runs]),
        replicas_identical=all(run.replicas_identical for run in runs),
        spread=Spread(
            seeds=tuple(seeds),
            final_loss=tuple(run.final_loss for run in runs),
            seconds_to_target=tuple(run.seconds_to_target for run in runs),
            loss_deviation=_deviation([run.final_loss for run in runs]),
            curve_deviation=tuple(_deviation([loss for *_, loss in point]) for point in points),
        ),
    )


def _middle(point: Sequence[Point]) -> Point:
    seconds, sent, losses = zip(*point, strict=True)
    return median(seconds), median(sent), fmean(losses)


def _deviation(losses: Sequence[float]) -> float:
    """Return the standard deviation of a sample, NaN if a run has diverged."""
    return stdev(losses) if all(map(math.isfinite, losses)) else math.nan


def _medians(runs: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the median of each figure; None for one that a run does not have."""
    every = list(runs)
    columns = {key: [run[key] for run in every] for key in every[0]}
    return {key: None if None in values else median(values) for key, values in columns.items()}


def _median_or_never(seconds: Sequence[float | None]) -> float | None:
    middle = median(math.inf if each is None else each for each in seconds)
    return middle if math.isfinite(middle) else None

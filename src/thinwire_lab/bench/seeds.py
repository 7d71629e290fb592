"""One row from several that differ in their seed alone: losses become means, times and bytes medians."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from statistics import fmean, median, stdev

from thinwire_lab.bench.results import Point, Quantiles, Row, Split, Spread, WireBytes


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
        wire_bytes_per_step=_wire_bytes([run.wire_bytes_per_step for run in runs]),
        loss_curve=tuple(map(_middle, points)),
        final_loss=fmean(run.final_loss for run in runs),
        seconds_to_target=_median_or_never([run.seconds_to_target for run in runs]),
        speedup_vs_dense=dense.step_seconds.p50 / seconds.p50 if dense else runs[0].speedup_vs_dense,
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


def _medians(runs: Iterable[Mapping[str, float]]) -> dict[str, float]:
    every = list(runs)
    return {key: median(run[key] for run in every) for key in every[0]}


def _wire_bytes(runs: Sequence[WireBytes]) -> WireBytes:
    def known(values: Sequence[float | None]) -> float | None:
        found = [value for value in values if value is not None]
        return median(found) if len(found) == len(values) else None

    return WireBytes(
        measured=known([run.measured for run in runs]),
        declared=known([run.declared for run in runs]),
        dense=median(run.dense for run in runs),
    )


def _median_or_never(seconds: Sequence[float | None]) -> float | None:
    middle = median(math.inf if each is None else each for each in seconds)
    return middle if math.isfinite(middle) else None

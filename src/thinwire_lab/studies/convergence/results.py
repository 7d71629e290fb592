"""Runs in a file of JSON lines, and what several seeds say together."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from thinwire_lab.inputs import read_lines
from thinwire_lab.studies.convergence.training import Run, Settings

NAMED = ("recipe", "optimizer", "rate", "model", "scale", "workers", "batch", "steps", "schedule", "warm_up")


def read(path: Path) -> list[Run]:
    return [Run.of(line) for line in read_lines(path)]


def several(runs: Iterable[Run]) -> list[dict[str, Any]]:
    """Return a row for runs that differ in nothing but their seeds, the lowest loss first, diverged ones last."""
    found = defaultdict[Settings, list[Run]](list)
    for run in runs:
        found[replace(run.settings, seed=0)].append(run)
    rows = [_row(settings, each) for settings, each in found.items()]
    return sorted(rows, key=lambda row: row["loss"] if math.isfinite(row["loss"]) else math.inf)


def _row(settings: Settings, runs: Sequence[Run]) -> dict[str, Any]:
    """Return the mean loss, and the standard deviation over seeds, estimated from this sample."""
    losses = [run.loss for run in runs]
    apart = stdev(losses) if len(losses) > 1 and all(map(math.isfinite, losses)) else None
    figures = {"bits": fmean(run.bits for run in runs), "seeds": len(runs), "loss": fmean(losses), "deviation": apart}
    return {name: getattr(settings, name) for name in NAMED} | figures

"""Runs in a file of JSON lines, and what several seeds say together."""

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev

from thinwire_lab.show.table import Column, Table, tabulated
from thinwire_lab.studies.convergence.training import Run, Settings


def read(path: Path) -> list[Run]:
    """Return the runs in the file, in its order; none if there is no file."""
    return [Run.of(json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


def append(path: Path, run: Run) -> None:
    """Add a run, as a line."""
    with path.open("a") as file:
        file.write(json.dumps(run.document()) + "\n")


@dataclass(frozen=True, kw_only=True)
class Several:
    """Runs that differ in nothing but their seeds."""

    runs: Sequence[Run]

    @property
    def settings(self) -> Settings:
        """Return the settings, with those of the first seed."""
        return self.runs[0].settings

    @property
    def loss(self) -> float:
        return fmean(run.loss for run in self.runs)

    @property
    def spread(self) -> float:
        """Return the standard deviation over seeds, estimated from this sample; NaN for a single seed."""
        return stdev(run.loss for run in self.runs) if len(self.runs) > 1 else math.nan

    @property
    def bits(self) -> float:
        return fmean(run.bits for run in self.runs)


def grouped(runs: Iterable[Run]) -> list[Several]:
    """Put runs together that differ in nothing but their seeds, the lowest loss first."""
    found = defaultdict[Settings, list[Run]](list)
    for run in runs:
        found[replace(run.settings, seed=0)].append(run)
    return sorted((Several(runs=each) for each in found.values()), key=_rank)


def tuned(groups: Iterable[Several]) -> list[Several]:
    """Keep the best learning rate of each method; of the rates tried with most seeds, if they differ in that."""
    found = defaultdict[Settings, list[Several]](list)
    for each in groups:
        found[replace(each.settings, seed=0, rate=0.0)].append(each)
    return sorted((min(rates, key=lambda each: (-len(each.runs), _rank(each))) for rates in found.values()), key=_rank)


def table(groups: Sequence[Several]) -> Table:
    """Return a row for each, with its loss over that of dense AdamW's best where it was run under the same terms."""
    dense = {
        _terms(each): each.loss
        for each in reversed(groups)
        if each.settings.recipe == "dense()" and each.settings.optimizer.startswith("adamw")
    }
    columns: list[Column[Several]] = [
        Column(
            heading="model",
            text=lambda x: x.settings.model + (f", scale {x.settings.scale:g}" if x.settings.scale != 1 else ""),
            left=True,
        ),
        Column(
            heading="workers",
            text=lambda x: f"{x.settings.workers}" + (f" of {x.settings.batch} samples" if x.settings.batch else ""),
        ),
        Column(heading="steps", text=lambda x: str(x.settings.steps)),
        Column(
            heading="schedule",
            text=lambda x: f"{x.settings.schedule}, {x.settings.warm_up} steps of warm-up",
            left=True,
        ),
        Column(heading="recipe", text=lambda x: f"`{x.settings.recipe}`", left=True),
        Column(heading="optimizer", text=lambda x: f"`{x.settings.optimizer}`", left=True),
        Column(heading="learning rate", text=lambda x: f"{x.settings.rate:g}"),
        Column(heading="bits", text=lambda x: f"{x.bits:.3g}"),
        Column(heading="seeds", text=lambda x: str(len(x.runs))),
        Column(heading="held-out loss", text=_loss),
        Column(
            heading="over dense AdamW", text=lambda x: f"{x.loss / dense[_terms(x)]:.3f}" if _terms(x) in dense else "—"
        ),
    ]
    return tabulated(columns, groups)


def _rank(several: Several) -> float:
    return several.loss if math.isfinite(several.loss) else math.inf


def _loss(several: Several) -> str:
    if not math.isfinite(several.loss):
        return "diverged"
    return f"{several.loss:.3f}" + (f" ± {several.spread:.3f}" if len(several.runs) > 1 else "")


def _terms(several: Several) -> Settings:
    """Return what must be equal for two results to compare."""
    return replace(several.settings, recipe="", optimizer="", rate=0.0, seed=0)

"""Trainings with virtual workers, and what several seeds say together."""

import math
import tomllib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import Any, Self, TypeVar

from thinwire_lab.bench.rows import first_at
from thinwire_lab.machine import FIRST
from thinwire_lab.papers.shared.ledger import FOLDER
from thinwire_lab.papers.shared.material import Absent
from thinwire_lab.papers.shared.shelf import DATA, TRAIN, Evidence, Shelf

FILE = "learning.jsonl"
RATES = {"mlp": 0.2, "xml": 640.0, "resnet20": 0.1, "vgg": 0.02, "transformer": 0.2, "lstm": 4.0}
"""Learning rates of SGD with momentum 0.9: of those tried, where dense ends lowest (their runs are in FILE)."""

_WITHOUT_DATA = ("transformer", "xml")
_ALWAYS = {"optimizer": "sgd()", "warm_up": 20}
Lines = Sequence[Mapping[str, Any]]
K = TypeVar("K")
R = TypeVar("R")
_T = (
    *(math.inf, math.inf, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447),
    *(2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145),
    *(2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074),
    *(2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
    *(2.040, 2.037, 2.035, 2.032, 2.030, 2.028, 2.026, 2.024),
)
"""The 97.5 % quantile of Student's t, by the number of values."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One training: held-out loss and accuracy over steps, and bits per parameter and step."""

    seed: int
    steps: Sequence[int]
    losses: Sequence[float]
    accuracies: Sequence[float]
    bits: float

    @property
    def loss(self) -> float:
        """At the end; infinite where it diverged."""
        return self.losses[-1] if math.isfinite(self.losses[-1]) else math.inf

    @property
    def accuracy(self) -> float:
        """At the end, in percent."""
        return 100 * self.accuracies[-1]

    def steps_to(self, target: float) -> float:
        """Return after how many steps the loss first is at most `target`, between two looks; infinite if never."""
        found = first_at(target, zip(self.steps, self.losses, strict=True))
        return math.inf if found is None else found


Series = Sequence[Trial]
Ways = Mapping[str, Series]


@dataclass(frozen=True, kw_only=True)
class Way:
    """A recipe, as thinwire_lab.studies.convergence reads it, and what differs from the other rows.

    schedule: of the learning rate.
    """

    recipe: str
    rate: float | None = None
    batch: int | None = None
    schedule: str = "constant"


@dataclass(frozen=True, kw_only=True, eq=False)
class Trials(Evidence):
    """Each way on each seed, all else equal. `rate`: dense's best; scale: of the model's size."""

    model: str
    workers: int
    steps: int
    rate: float
    ways: Mapping[str, Way]
    seeds: tuple[int, ...] = (0, 1, 2)
    scale: float = 1.0

    @property
    def commands(self) -> tuple[str, ...]:
        return tuple(self._command(way) for way in self.ways.values())

    def missing(self, shelf: Shelf) -> tuple[str, ...]:
        """See `shelf.Evidence`. A training by another version is missing, and read while there is none by today's."""
        lines = [line for line in shelf.lines(FILE) if shelf.is_current(line)]
        return tuple(self._command(way) for way in self.ways.values() if len(self._of(way, lines)) < len(self.seeds))

    def read(self, shelf: Shelf) -> dict[str, list[Trial]]:
        """Return a trial for each way and seed, those of a seed by one version. Raises Absent if one is missing."""
        ways = ", ".join(self.ways)
        return by_one_version(shelf.lines(FILE), self.seeds, self._found, f"{ways} on {self.model}")

    def only(self, *names: str) -> Self:
        return replace(self, ways={name: self.ways[name] for name in names})

    def on(self, seeds: int) -> Self:
        return replace(self, seeds=tuple(range(seeds)))

    def shrunk(self) -> Self:
        return replace(self, steps=4, seeds=(0, 1))

    def _found(self, lines: Lines) -> dict[str, dict[int, Trial]]:
        return {name: self._of(way, lines) for name, way in self.ways.items()}

    def _of(self, way: Way, lines: Lines) -> dict[int, Trial]:
        """Return the newest trial of each seed."""
        wanted = self._settings(way)
        fitting = [line for line in lines if all(line.get(name, 1.0) == value for name, value in wanted.items())]
        return {line["seed"]: _trial(line) for line in fitting if line["seed"] in self.seeds}

    def _settings(self, way: Way) -> dict[str, Any]:
        found = {name: getattr(self, name) for name in ("model", "steps", "scale", "workers")}
        found |= {name: getattr(way, name) for name in ("recipe", "batch", "schedule")}
        return found | _ALWAYS | {"rate": way.rate or self.rate}

    def _command(self, way: Way) -> str:
        settings = self._settings(way)
        given = {
            **({} if self.model in _WITHOUT_DATA else {"data": DATA}),
            **{name: settings[name] for name in ("model", "workers", "steps", "rate")},
            "recipe": f'"{way.recipe}"',
            "optimizer": f'"{settings["optimizer"]}"',
            "warm-up": settings["warm_up"],
            "seeds": ",".join(map(str, self.seeds)),
        }
        usual = {"batch": None, "scale": 1.0, "schedule": "constant"}
        given |= {name: settings[name] for name, value in usual.items() if settings[name] != value}
        options = " ".join(f"--{name} {value}" for name, value in given.items())
        return f"python -m {TRAIN} run papers/runs/{FILE} {options}"


def by_one_version(
    lines: Lines, seeds: Sequence[int], found: Callable[[Lines], Mapping[K, Mapping[int, R]]], what: str
) -> dict[K, list[R]]:
    """Return each way's runs: all those of a seed by the newest version that has them. Raises Absent if one is missing.

    found: takes lines, and returns runs by way and seed.
    """
    versions, rounds = defaultdict[str, list[Mapping[str, Any]]](list), dict[int, dict[K, R]]()
    for line in lines:
        versions[line.get("thinwire", FIRST)].append(line)
    for each in versions.values():
        ways = found(each)
        for seed in set(seeds).intersection(*ways.values()):
            rounds[seed] = {name: runs[seed] for name, runs in ways.items()}
    if len(rounds) < len(seeds):
        raise Absent(f"{what} has {len(rounds)} of {len(seeds)} seeds")
    return {name: [rounds[seed][name] for seed in seeds] for name in rounds[seeds[0]]}


def trained(paper: str) -> dict[str, Trials]:
    """Return what the paper's trainings.toml has, by name, each with some of its ways; `like`: what it does not say."""
    told = tomllib.loads((FOLDER / paper / "trainings.toml").read_text())
    ways, found = told.pop("ways"), dict[str, dict[str, Any]]()
    for name, entry in told.items():
        found[name] = found.get(entry.pop("like", ""), {}) | entry
    return {name: _told(ways, **entry) for name, entry in found.items()}


def _told(
    known: Mapping[str, Any], *, model: str, ways: Sequence[str], slower: float = 1, seeds: int = 3, **more: Any
) -> Trials:
    """Return trainings; `slower`, of all or of a way: what divides the model's rate."""
    made, schedule = {}, more.pop("schedule", "constant")
    for name in ways:
        given = {"recipe": known[name]} if isinstance(known[name], str) else dict(known[name])
        if "slower" in given:
            given["rate"] = RATES[model] / given.pop("slower")
        made[name] = Way(schedule=schedule, **given)
    return Trials(model=model, rate=RATES[model] / slower, ways=made, **more).on(seeds)


def _trial(line: Mapping[str, Any]) -> Trial:
    steps, losses, _, accuracies = zip(*((*look, None)[:4] for look in line["looks"]), strict=True)
    return Trial(
        seed=line["seed"],
        steps=steps,
        losses=losses,
        accuracies=[math.nan if x is None else x for x in accuracies],
        bits=line["bits"],
    )


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A mean over seeds, and half of its 95 % interval. Where a seed has diverged, the mean is infinite."""

    mean: float
    half: float
    unit: str = "%"

    @property
    def above(self) -> bool:
        return self.mean - self.half > 0

    @property
    def below(self) -> bool:
        return self.mean + self.half < 0

    def within(self, margin: float) -> bool:
        return abs(self.mean) + self.half <= margin

    def __str__(self) -> str:
        return f"{self.bare} {self.unit}" if math.isfinite(self.mean) else self.bare

    @property
    def bare(self) -> str:
        return f"{self.mean:+.2f} ± {self.half:.2f}" if math.isfinite(self.mean) else "diverged on a seed"


def over(series: Series, base: Series) -> Interval:
    """Return by how many percent the final loss is above the other's, seed by seed."""
    return interval([100 * (a.loss / b.loss - 1) for a, b in zip(series, base, strict=True)])


def points_lost(series: Series, base: Series) -> Interval:
    """Return by how many points the final accuracy is below the other's, seed by seed."""
    return interval([b.accuracy - a.accuracy for a, b in zip(series, base, strict=True)], "points lost")


def perplexity_over(series: Series, base: Series) -> Interval:
    """Return by how many percent the final perplexity is above the other's, seed by seed."""
    return interval([100 * (math.exp(a.loss - b.loss) - 1) for a, b in zip(series, base, strict=True)])


def interval(values: Sequence[float], unit: str = "%") -> Interval:
    """Return mean and 95 % interval of a few values, by Student's t.

    A value that is not finite is of a seed that has diverged. If the others are above 0, so is all of the interval.
    """
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) < len(values):
        return Interval(mean=math.inf, half=0.0 if min(finite, default=math.inf) > 0 else math.inf, unit=unit)
    half = _T[len(values)] * stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.inf
    return Interval(mean=fmean(values), half=half, unit=unit)


def steps_to(series: Series, targets: Sequence[float]) -> float:
    """Return the mean number of steps to a target for each seed; infinite if a seed never gets there."""
    return fmean(trial.steps_to(target) for trial, target in zip(series, targets, strict=True))


def more_steps(series: Series, other: Series, targets: Sequence[float], times: float = 1) -> Interval:
    """Return by how many percent it needs more steps to a target than `times` the other's, seed by seed."""
    pairs = zip(series, other, targets, strict=True)
    return interval([100 * (a.steps_to(target) / b.steps_to(target) - times) for a, b, target in pairs])

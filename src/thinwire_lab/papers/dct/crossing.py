"""DCT-MP's claims about losses, on trainings with boundaries where a pipeline would be split."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, Self

from thinwire_lab.papers.dct.rows import BASELINE, Row, rows
from thinwire_lab.papers.dct.training import Document as Trainings
from thinwire_lab.papers.dct.training import Run
from thinwire_lab.papers.dct.training import over as percent_over
from thinwire_lab.papers.shared.claims import DCT
from thinwire_lab.papers.shared.judging import by_setting, every, no_worse, worse
from thinwire_lab.papers.shared.ledger import FAILS, HOLDS, UNDECIDED, Outcome
from thinwire_lab.papers.shared.material import Absent
from thinwire_lab.papers.shared.shelf import Document, Evidence, Shelf
from thinwire_lab.papers.shared.trials import Interval, interval

MARGIN = 1.0
"""Percent of the held-out loss within which these count as the same: seeds differ by less than in other trainings."""
DENSE = f"{BASELINE} | 0% | none"
_SPLIT, _TWICE, _INSIDE = "2 workers", "3 workers", ("1 activation function", "2 activation functions")


@dataclass(frozen=True, kw_only=True)
class Boundaries(Evidence):
    """Every row of a problem's comparison, or dense's and these `only`, on each seed."""

    problem: str
    seeds: tuple[int, ...] = tuple(range(10))
    only: tuple[str, ...] = ()
    options: str = ""

    @property
    def commands(self) -> tuple[str, ...]:
        only = "".join(f' --only "{row}"' for row in self.only)
        return (
            f"python -m thinwire_lab.papers.dct.model_parallel accuracy --problem {self.problem} "
            f"--seeds {len(self.seeds)}{self.options}{only} --resume --json papers/runs/{self._name}",
        )

    @property
    def _name(self) -> str:
        return f"boundaries-{self.problem}.json"

    def read(self, shelf: Shelf) -> "Losses":
        """Return what became of each row. Raises Absent where a seed is missing."""
        path = shelf.folder / self._name
        if not path.exists():
            raise Absent(f"{self._name} has not been run")
        document = Trainings.read(path)
        found = {
            row.name: [run for run in document.of(self.problem, row.name) if run.seed in self.seeds]
            for row in rows(self.problem)
            if not self.only or row.name in (DENSE, *self.only)
        }
        for name, runs in found.items():
            if len(runs) < len(self.seeds):
                raise Absent(f"{name} of {self.problem} has {len(runs)} of {len(self.seeds)} seeds")
        return Losses(runs=found)

    def shrunk(self) -> Self:
        return replace(self, seeds=(0, 1), options=" --steps 2")


@dataclass(frozen=True, kw_only=True)
class Losses:
    """A problem's runs by row, such as `exact | 90% | 2 workers`."""

    runs: Mapping[str, Sequence[Run]]

    def over(self, row: str, other: str = DENSE) -> Interval:
        """Return by how many percent the held-out loss is above the other row's, seed by seed."""
        return interval(list(percent_over(self.runs[row], self.runs[other])))

    def kept(self, row: str) -> float:
        """Return the share that passed, in percent."""
        return 100 * fmean(run.kept for run in self.runs[row])

    def said(self, *named: str, other: str = DENSE) -> str:
        return ", ".join(f"{row.split(' | ')[1]} {self.over(row, other)}" for row in named)


DLRM, TEXT = Boundaries(problem="dlrm", seeds=tuple(range(15))), Boundaries(problem="transformer")
HYBRID = Document(
    name="hybrid",
    words="python -m thinwire_lab.studies.server_hybrid --link 100mbit --steps 60 --rounds 5 --rate 0.3",
    quick="--steps 4 --rounds 2",
    seeds=(0, 1, 2, 3, 4),
    more="more seeds",
)
OTHER_HYBRIDS = tuple(
    replace(HYBRID, name=f"hybrid-{left_out}", words=f"{HYBRID.words} --lines neither,both --boundary {share:g}")
    for left_out, share in ((75, 0.25), (95, 0.05))
)


def _exact(place: str, *sparsities: int) -> list[str]:
    return [f"exact | {each}% | {place}" for each in sparsities]


def _both(models: Mapping[str, Losses], *named: str) -> str:
    return "; ".join(f"{model} {losses.said(*named)}" for model, losses in models.items())


def _same_then_worse(models: Mapping[str, Losses], same: Sequence[str], last: str) -> tuple[str, str]:
    """Return the verdict on rows that are as good as dense, and a last one that is not, by model."""
    parts = {}
    for model, losses in models.items():
        words = {row: no_worse(losses.over(row), MARGIN) for row in same} | {last: worse(losses.over(last), MARGIN)}
        parts[model] = every(words)[0]
    return by_setting(parts)


@DCT.judge("T8", DLRM, TEXT)
def one_cut(dlrm: Losses, text: Losses) -> Outcome:
    models, named = {"DLRM": dlrm, "the transformer": text}, _exact(_SPLIT, 75, 90, 95, 98)
    return Outcome(*_same_then_worse(models, named[:3], named[3]), measured=_both(models, *named[2:]))


@DCT.judge("T9", replace(DLRM, seeds=tuple(range(25)), only=tuple(_exact(_TWICE, 90, 95))), TEXT)
def two_cuts(dlrm: Losses, text: Losses) -> Outcome:
    models, named = {"DLRM": dlrm, "the transformer": text}, _exact(_TWICE, 90, 95)
    return Outcome(*_same_then_worse(models, named[:1], named[1]), measured=_both(models, *named))


@DCT.judge("T10", DLRM, TEXT)
def many_cuts(dlrm: Losses, text: Losses) -> Outcome:
    (five,), (four,) = _exact("5 activation functions", 75), _exact("3 workers + 2 activation functions", 75)
    found = {"DLRM, five cuts": dlrm.over(five), "the transformer, four": text.over(four)}
    measured = "; ".join(f"{name}: {each}" for name, each in found.items())
    return Outcome(*by_setting({name: worse(each, MARGIN) for name, each in found.items()}), measured=measured)


@DCT.judge("T12", HYBRID, *OTHER_HYBRIDS)
def both_at_once(*found: Mapping[str, Any]) -> Outcome:
    pairs = (zip(each["runs"]["both"], each["runs"]["neither"], strict=True) for each in found)
    ninety, seventy_five, ninety_five = (
        interval([100 * (both["loss"] / neither["loss"] - 1) for both, neither in each]) for each in pairs
    )
    measured = f"both: 75 % {seventy_five}, 90 % {ninety}, 95 % {ninety_five}"
    return Outcome(*every({"90 %": no_worse(ninety, MARGIN), "95 %": worse(ninety_five, MARGIN)}), measured=measured)


@DCT.judge("T13", TEXT)
def perplexity(text: Losses) -> Outcome:
    found = {row: text.over(row) for place in _INSIDE for row in _exact(place, 90, 95)}
    word, note = every({row.removeprefix("exact | "): no_worse(each, MARGIN) for row, each in found.items()})
    better = all(each.below for each in found.values())
    one, two = _INSIDE
    behind = f"behind one {text.said(*_exact(one, 90, 95))}, behind two {text.said(*_exact(two, 90, 95))}"
    return Outcome(verdict=word, note=": better than claimed" if word == HOLDS and better else note, measured=behind)


@DCT.judge("T19", DLRM, TEXT)
def fitted(dlrm: Losses, text: Losses) -> Outcome:
    models = {"DLRM": dlrm, "the transformer": text}
    parts, said = {}, []
    for model, losses in models.items():
        for sparsity in (75, 95):
            rows = [f"{method} | {sparsity}% | {_SPLIT}" for method in ("Laplace", "exact, as many as Laplace")]
            found = losses.over(*rows)
            parts[f"{model} at {sparsity} %"] = no_worse(found, 0.5)
            said.append(f"{model} at {sparsity} %, {losses.kept(rows[0]):.1f} % kept: {found}")
    return Outcome(*by_setting(parts), measured="; ".join(said))


@DCT.judge("T22", DLRM, TEXT)
def sketches(dlrm: Losses, text: Losses) -> Outcome:
    models = {"DLRM": dlrm, "the transformer": text}
    (mask,), sketch = _exact(_SPLIT, 75), f"Gaussian sketch | 50% | {_SPLIT}"
    parts = {}
    for model, losses in models.items():
        words = {name: worse(losses.over(sketch, row), MARGIN) for name, row in (("dense", DENSE), ("Top-k", mask))}
        parts[model] = every(words)[0]
    over_mask = ", ".join(f"{model} {losses.over(sketch, mask)}" for model, losses in models.items())
    return Outcome(*by_setting(parts), measured=f"{_both(models, sketch)}; over Top-k at 75 %: {over_mask}")


@DCT.judge("T23", DLRM, TEXT)
def own_mask(dlrm: Losses, text: Losses) -> Outcome:
    places = {"DLRM, one cut": (dlrm, _SPLIT), "two cuts": (dlrm, _TWICE), "the transformer": (text, _SPLIT)}
    parts, said = {}, []
    for name, (losses, place) in places.items():
        pairs = [(f"gradient top-k, error feedback | {s}% | {place}", *_exact(place, s)) for s in (75, 90)]
        parts[name] = every({own: worse(losses.over(own, mask), MARGIN) for own, mask in pairs})[0]
        said.append(f"{name} " + ", ".join(losses.said(own, other=mask) for own, mask in pairs))
    return Outcome(*by_setting(parts), measured="; ".join(said))


@DCT.judge("T26", DLRM, TEXT)
def regularises(dlrm: Losses, text: Losses) -> Outcome:
    places = {
        "DLRM": (dlrm, _SPLIT),
        "the transformer's stream": (text, _SPLIT),
        "inside its block": (text, _INSIDE[0]),
    }
    named = {name: (losses, _exact(place, 75, 90, 95)) for name, (losses, place) in places.items()}
    parts = {name: _better(losses, rows) for name, (losses, rows) in named.items()}
    measured = "; ".join(f"{name}: {losses.said(*rows)}" for name, (losses, rows) in named.items())
    return Outcome(*by_setting(parts), measured=measured)


def _better(losses: Losses, named: Sequence[str]) -> str:
    found = [losses.over(row) for row in named]
    narrow = all(each.half <= 2 * MARGIN for each in found)
    return HOLDS if any(each.below for each in found) else FAILS if narrow else UNDECIDED


LEFT_OUT = (0.5, 0.75, 0.9, 0.95, 0.98)
HEAD = (
    f"| method | cut | {' | '.join(f'{each:.0%}' for each in LEFT_OUT)} |\n| --- | --- |{' ---: |' * len(LEFT_OUT)}\n"
)
_TITLES = {DLRM: "DLRM", TEXT: "Transformer"}


def lines(shelf: Shelf) -> str:
    """Return how far losses end above dense's, a line for each method and cut. Raises Absent without a run."""
    found = ""
    for boundaries, title in _TITLES.items():
        losses, cells = boundaries.read(shelf), dict[tuple[str, str], dict[float, Row]]()
        for row in rows(boundaries.problem):
            if row.method != BASELINE:
                cells.setdefault((row.method, row.place), {})[row.sparsity] = row
        found += f"| **{title}** | |{' |' * len(LEFT_OUT)}\n"
        for (method, place), by_sparsity in cells.items():
            said = (losses.over(by_sparsity[each].name).bare if each in by_sparsity else "" for each in LEFT_OUT)
            found += " ".join(f"| {method} | {place} | {' | '.join(said)} |".split()) + "\n"
    return found

"""Which claims are asked for, what has yet to run for them, and what the runs say."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Self

from matplotlib.figure import Figure

from papers.lab.catalogue import ROOMS, catalogue
from papers.lab.claims import UNTESTABLE, Judge, Paper
from papers.lab.ledger import Outcome, Row, judged
from papers.lab.material import Absent
from papers.lab.shelf import Document, Shelf

GRADIENTS = Document(name="gradients", words="python -m papers.gradients --data DATA", quick="--quick")
"""The claims that `checks` decide."""


@dataclass(frozen=True, kw_only=True)
class Deciding:
    """Some claims and their judges; a claim without one is open."""

    names: Sequence[str]
    judges: Mapping[str, Judge]

    @classmethod
    def of(cls, papers: Iterable[Paper], asked: Sequence[str]) -> Self:
        """Return those of the claims or papers named, all if none is. Raises KeyError for what is neither."""
        for name in asked:
            if name not in catalogue() and name not in ROOMS:
                raise KeyError(name)
        names = [name for name, claim in catalogue().items() if not asked or {name, claim.paper} & set(asked)]
        judges = {name: judge for paper in papers for name, judge in (_checked(paper) | paper.judges).items()}
        return cls(names=names, judges={name: judges[name] for name in names if name in judges})

    def shrunk(self) -> Self:
        """Return the same with runs that are short."""
        small = {
            name: Judge(evidence=[each.shrunk() for each in judge.evidence], decide=judge.decide)
            for name, judge in self.judges.items()
        }
        return type(self)(names=self.names, judges=small)

    def missing(self, name: str, shelf: Shelf) -> Sequence[str]:
        """Return the commands that a claim waits for."""
        judge = self.judges.get(name)
        return [command for each in judge.evidence for command in each.missing(shelf)] if judge else []

    def commands(self, shelf: Shelf) -> Sequence[str]:
        """Return all commands that are missing, each once."""
        return list(dict.fromkeys(command for name in self.names for command in self.missing(name, shelf)))

    def rows(self, shelf: Shelf) -> dict[str, Row]:
        """Judge every claim whose runs are there."""
        found = {}
        for name, judge in self.judges.items():
            try:
                read = [each.read(shelf) for each in judge.evidence]
                outcome = judge.decide(*read)
            except Absent:
                continue
            spreads = (each.spread(what) for each, what in zip(judge.evidence, read, strict=True))
            outcome = replace(outcome, spread="; ".join(filter(None, dict.fromkeys(spreads))))
            seeds = [seed for each in judge.evidence for seed in each.seeds]
            commands = [command for each in judge.evidence for command in each.commands]
            found[name] = judged(catalogue()[name], outcome, seeds, commands)
        return found


def drawn(papers: Iterable[Paper], shelf: Shelf) -> Iterator[tuple[str, Figure]]:
    """Yield the papers' figures beside ours, by their place in the house, as far as their runs are there."""
    for paper in papers:
        for name, drawing in paper.drawings.items():
            with suppress(Absent):
                yield f"{paper.name}/{name}.png", drawing.redraw(*(each.read(shelf) for each in drawing.evidence))


def _checked(paper: Paper) -> dict[str, Judge]:
    """Return a judge for each check, which reads what `papers.gradients` found."""
    return {name: Judge(evidence=[GRADIENTS], decide=_reader(name)) for name in paper.checks}


def _reader(name: str) -> Callable[[Mapping[str, Any]], Outcome]:
    def read(document: Mapping[str, Any]) -> Outcome:
        found = next((row for row in document["claims"] if row["id"] == name), None)
        if found is None or found["verdict"] == UNTESTABLE:
            raise Absent(f"{GRADIENTS.name} has no verdict on {name}")
        return Outcome(verdict=found["verdict"], measured=found["figure"], how=found["how"])

    return read

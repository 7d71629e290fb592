"""Which claims are asked for, what has yet to run for them, and what the runs say."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Self

from thinwire_lab.papers.shared.claims import GRADIENTS, Judge, Paper
from thinwire_lab.papers.shared.ledger import DECIDES, NAMES, OPEN, UNDECIDED, Outcome, Row, catalogue, judged
from thinwire_lab.papers.shared.material import Absent
from thinwire_lab.papers.shared.shelf import Shelf


@dataclass(frozen=True, kw_only=True)
class Deciding:
    """Some claims and their judges; a claim without one is open."""

    names: Sequence[str]
    judges: Mapping[str, Judge]

    @classmethod
    def of(cls, papers: Iterable[Paper], asked: Sequence[str]) -> Self:
        """Return those of the claims or papers named, all if none is. Raises KeyError for what is neither."""
        for name in asked:
            if name not in catalogue() and name not in NAMES:
                raise KeyError(name)
        names = [name for name, claim in catalogue().items() if not asked or {name, claim.paper} & set(asked)]
        judges = {name: judge for paper in papers for name, judge in (_checked(paper) | paper.judges).items()}
        return cls(names=names, judges={name: judges[name] for name in names if name in judges})

    def shrunk(self) -> Self:
        small = {name: [each.shrunk() for each in judge.evidence] for name, judge in self.judges.items()}
        return replace(self, judges={name: replace(self.judges[name], evidence=small[name]) for name in small})

    def missing(self, name: str, shelf: Shelf) -> Sequence[str]:
        judge = self.judges.get(name)
        return [command for each in judge.evidence for command in each.missing(shelf)] if judge else []

    def commands(self, shelf: Shelf) -> Sequence[str]:
        return list(dict.fromkeys(command for name in self.names for command in self.missing(name, shelf)))

    def rows(self, shelf: Shelf) -> dict[str, Row]:
        """Judge every claim whose runs are there."""
        found = {}
        for name in self.judges:
            with suppress(Absent):
                found[name] = self.row(name, shelf)
        return found

    def row(self, name: str, shelf: Shelf) -> Row:
        """Judge a claim that has a judge. Raises Absent where a run is missing, ValueError where one is damaged."""
        used = self.judges[name].evidence
        read = [each.read(shelf) for each in used]
        spreads = (each.spread(what) for each, what in zip(used, read, strict=True))
        outcome = replace(self.judges[name].decide(*read), spread="; ".join(filter(None, dict.fromkeys(spreads))))
        outcome = replace(outcome, how=outcome.how or catalogue()[name].how.format(**outcome.said))
        if outcome.verdict == UNDECIDED:
            more = outcome.more or " or ".join(dict.fromkeys(each.more for each in used))
            outcome = replace(outcome, how=f"{outcome.how}. {DECIDES}{more}")
        seeds = [seed for each in used for seed in each.seeds]
        commands = [command for each in used for command in each.commands]
        return judged(catalogue()[name], outcome, seeds, commands)

    def unfounded(self, rows: Mapping[str, Row], shelf: Shelf) -> Iterator[str]:
        """Yield what is wrong with each row that its runs do not bear out, or that has none."""
        for name in self.names:
            problem = self._problem(rows[name], shelf)
            if problem:
                yield f"{name}: {problem}"

    def _problem(self, row: Row, shelf: Shelf) -> str:
        if row.id not in self.judges:
            return "" if row.verdict == OPEN else f"no judge says that it is {row.verdict!r}"
        try:
            found = self.row(row.id, shelf)
        except (Absent, ValueError) as problem:
            return "" if row.verdict == OPEN else str(problem)
        other = [field.name for field in fields(Row) if getattr(found, field.name) != getattr(row, field.name)]
        return f"its runs say otherwise: {', '.join(other)}" if other else ""


def _checked(paper: Paper) -> dict[str, Judge]:
    """Return a judge for each check, which reads what `thinwire_lab.papers.gradients` found."""
    return {name: Judge(evidence=[GRADIENTS], decide=partial(_read, name)) for name in paper.checks}


def _read(name: str, found: Mapping[str, Outcome]) -> Outcome:
    if name not in found:
        raise Absent(f"the runs on gradients have no verdict on {name}")
    return found[name]

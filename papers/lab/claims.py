"""A paper's claims, how we judge them, and the verdicts."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from matplotlib.figure import Figure

from papers.lab.material import Absent, Material, Run

HOLDS, FAILS, OPEN = "holds", "does not hold", "not testable here"

TRAINING = "needs training to a target with several seeds: thinwire bench, not this program"
NETWORK = "needs a network with a set rate and time on it: thinwire bench, not this program"
HARDWARE = "needs GPUs or more machines than here"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Whether a claim's criterion is met, the figures in words, and how they were measured."""

    holds: bool
    figure: str
    how: str


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A row of the report. The fields are the document's keys."""

    id: str
    claim: str
    verdict: str
    figure: str
    how: str


@dataclass(frozen=True, kw_only=True)
class Sheet:
    """A table of a paper's own: `key` names it in the document, `rows` are plain values by name."""

    key: str
    title: str
    heads: Sequence[str]
    cells: Sequence[Sequence[str]]
    rows: Sequence[Mapping[str, object]]


Check = Callable[[Material], Finding]
Draw = Callable[[Sequence[Run]], Figure]
Tabulate = Callable[[Sequence[Run]], Sheet]


@dataclass(frozen=True, kw_only=True)
class Paper:
    """A paper's claims. `checks` decide some; `elsewhere` names the others, with what would decide them.

    Its files register their checks, figures and tables with the decorators.
    """

    name: str
    elsewhere: Mapping[str, tuple[str, str]]
    checks: dict[str, tuple[str, Check]] = field(default_factory=dict)
    figures: dict[str, tuple[str, Draw]] = field(default_factory=dict)
    tables: list[Tabulate] = field(default_factory=list)

    def claim(self, name: str, text: str) -> Callable[[Check], Check]:
        """Register a function as the check of claim `name`: the claim holds where the function says so."""

        def register(check: Check) -> Check:
            self.checks[name] = (text, check)
            return check

        return register

    def figure(self, name: str, caption: str) -> Callable[[Draw], Draw]:
        """Register a function that draws what was recorded; the figure is `name`.png in the paper's folder."""

        def register(draw: Draw) -> Draw:
            self.figures[name] = (caption, draw)
            return draw

        return register

    def table(self, tabulate: Tabulate) -> Tabulate:
        """Register a function that tabulates what was recorded."""
        self.tables.append(tabulate)
        return tabulate


def judge(checks: Mapping[str, tuple[str, Check]], material: Material) -> Iterator[Verdict]:
    """Run every check. Without its data a claim is not testable; the reason says what is missing."""
    for name, (text, check) in checks.items():
        try:
            found = check(material)
        except Absent as absent:
            yield Verdict(id=name, claim=text, verdict=OPEN, figure="none", how=str(absent))
        else:
            verdict = HOLDS if found.holds else FAILS
            yield Verdict(id=name, claim=text, verdict=verdict, figure=found.figure, how=found.how)


def untestable(rows: Mapping[str, tuple[str, str]]) -> Iterator[Verdict]:
    """Return the claims that this program cannot decide; `rows` hold the claim and the reason."""
    for name, (text, reason) in rows.items():
        yield Verdict(id=name, claim=text, verdict=OPEN, figure="none", how=reason)


def number(verdict: Verdict) -> int:
    """Return the claim's number in its paper."""
    return int(verdict.id[1:])

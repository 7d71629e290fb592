"""What judges a paper's claims: checks on gradients, and judges of other runs."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from thinwire_lab.papers.shared.ledger import FAILS, HOLDS, NAMES, UNDECIDED, Outcome, catalogue
from thinwire_lab.papers.shared.material import Absent, Material
from thinwire_lab.papers.shared.shelf import Combined, Document, Evidence

UNTESTABLE = "not testable here"
_WORDS = {True: HOLDS, False: FAILS, None: UNDECIDED}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Whether a claim's criterion is met (None: undecided), the figures in words, and what the catalogue lacks."""

    holds: bool | None
    figure: str
    said: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A row of the report. The fields are the document's keys."""

    id: str
    claim: str
    verdict: str
    figure: str
    how: str


Check = Callable[[Material], Finding]
Decide = Callable[..., Outcome]


@dataclass(frozen=True, kw_only=True)
class Judge:
    """Decides a claim. `decide` takes what each of the evidence found, in order."""

    evidence: Sequence[Evidence]
    decide: Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class Paper:
    """What a paper's files register by decorators: `checks` decide claims on gradients, `judges` on other runs.

    By what rule a claim holds, its `criterion` in claims.toml says.
    """

    name: str
    judges: dict[str, Judge] = field(default_factory=dict)
    checks: dict[str, Check] = field(default_factory=dict)

    def claim(self, name: str) -> Callable[[Check], Check]:
        """Register a function as the check of claim `name`: the claim holds where the function says so."""

        def register(check: Check) -> Check:
            self.checks[name] = check
            return check

        return register

    def judge(self, name: str, *evidence: Evidence) -> Callable[[Decide], Decide]:
        """Register a function that decides claim `name` from what the evidence found."""

        def register(decide: Decide) -> Decide:
            self.judges[name] = Judge(evidence=evidence, decide=decide)
            return decide

        return register


DRAGONN, FFT_PAPER, S2, DCT, GTOPK = PAPERS = tuple(Paper(name=name) for name in NAMES)


def judge(
    checks: Mapping[str, Check], material: Material, tick: Callable[[], None] = lambda: None
) -> Iterator[Verdict]:
    """Run every check. Without its data a claim is not testable; the reason says what is missing."""
    for name, check in checks.items():
        claim = catalogue()[name]
        try:
            found = check(material)
        except Absent as absent:
            yield Verdict(id=name, claim=claim.claim, verdict=UNTESTABLE, figure="none", how=str(absent))
        else:
            how = claim.gradients.format(**found.said)
            yield Verdict(id=name, claim=claim.claim, verdict=_WORDS[found.holds], figure=found.figure, how=how)
        tick()


_NUMBER = re.compile(r"(?<![\w.])[+-]?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?%?(?![\d.]*[A-Za-z_])")
"""Not those in the names of layers."""


def over_seeds(documents: Sequence[Mapping[str, Any]]) -> dict[str, Outcome]:
    """Return what the seeds say together, by claim; a claim that one of them could not judge is left out."""
    by_seed = [{row["id"]: row for row in each["claims"] if row["verdict"] != UNTESTABLE} for each in documents]
    everywhere = set.intersection(*map(set, by_seed))
    return {name: together([rows[name] for rows in by_seed]) for name in by_seed[0] if name in everywhere}


def together(rows: Sequence[Mapping[str, str]]) -> Outcome:
    """Return one outcome of a claim's rows, one a seed: undecided where they disagree."""
    words = [row["verdict"] for row in rows]
    alike = len(set(words)) == 1
    note = "" if alike else f": seed by seed {', '.join(words)}"
    return Outcome(
        verdict=words[0] if alike else UNDECIDED,
        note=note,
        measured=spread_out([row["figure"] for row in rows]),
        how=rows[0]["how"],
    )


def spread_out(figures: Sequence[str]) -> str:
    """Return one figure of several: each number's median, and from where to where it goes if it differs.

    If they differ in more than numbers, return all of them.
    """
    numbers = [_NUMBER.findall(figure) for figure in figures]
    words = {tuple(_NUMBER.split(figure)) for figure in figures}
    if len(words) > 1:
        return f"seed by seed {' / '.join(figures)}"
    (between,) = words
    values = [_spread(each) for each in zip(*numbers, strict=True)]
    return "".join(part for pair in zip_longest(between, values, fillvalue="") for part in pair)


def _spread(numbers: Sequence[str]) -> str:
    ordered = sorted(numbers, key=lambda number: float(number.rstrip("%").replace(",", "")))
    middle = ordered[len(ordered) // 2]
    return middle if len(set(numbers)) == 1 else f"{middle} ({ordered[0]} to {ordered[-1]})"


_CHECKS = "python -m thinwire_lab.papers.gradients --data DATA"
GRADIENTS = Combined(
    documents=[
        Document(name="gradients", words=_CHECKS, quick="--quick"),
        *(Document(name=f"gradients-{seed}", words=f"{_CHECKS} --seed {seed}", seeds=(seed,)) for seed in (1, 2)),
    ],
    combine=over_seeds,
    more="a longer run",
    enough=1,
)

"""What a claim is, how one is registered, and what is said of it."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from fidelity_parts.material import Absent, Material

HOLDS, FAILS, OPEN = "holds", "does not hold", "not testable here"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Whether a claim's criterion is met, the figures in words, and how they were taken."""

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


Check = Callable[[Material], Finding]
CHECKS: dict[str, tuple[str, Check]] = {}


def claim(name: str, text: str) -> Callable[[Check], Check]:
    """Register a function as the check of claim `name`; its criterion is the condition that it returns as `holds`."""

    def register(check: Check) -> Check:
        CHECKS[name] = (text, check)
        return check

    return register


def judge(material: Material) -> Iterator[Verdict]:
    """Run every check. One that lacks its data is not testable, with the reason."""
    for name, (text, check) in CHECKS.items():
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


def in_order(verdict: Verdict) -> tuple[int, int]:
    """Sort by paper, then by number."""
    return "DFSTG".index(verdict.id[0]), int(verdict.id[1:])

"""What papers claim, and the ledger: a row a claim, with its verdict, what we measured, and the command that did."""

import json
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from thinwire.files import write_atomically
from thinwire_lab.cluster.link import parse_rate

FOLDER = Path(__file__).parents[4] / "papers"
"""Pages, claims, figures and runs: they lie in the checkout, and are not installed."""
NAMES = ("dragonn", "fft", "s2", "dct", "gtopk")


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What a paper says at `place`, its figures in short, what we run to judge it, and when it then holds.

    clauses: how many clauses of what we measured the paper's page has; the ledger has all of them. how, gradients: how
    we judge it, from runs and from recorded gradients; what stands in braces is known only then.
    """

    id: str
    paper: str
    place: str
    claim: str
    published: str
    check: str
    criterion: str
    clauses: int = 1
    how: str = ""
    gradients: str = ""


@cache
def catalogue() -> Mapping[str, Claim]:
    """Return every claim by its id, in the order of the papers."""
    return {
        name: Claim(id=name, paper=paper, **entry)
        for paper in NAMES
        for name, entry in tomllib.loads((FOLDER / paper / "claims.toml").read_text()).items()
    }


SCHEMA = "thinwire.papers/1"
LEDGER = FOLDER / "ledger.json"
HOLDS, FAILS, DEPENDS, UNDECIDED = "holds", "does not hold", "depends", "undecided"
OPEN = "open"
_RATE = re.compile(r"\b\d+[mg]bit\b")
"""As commands have it, such as `100mbit`."""
NOTHING = "\N{EN DASH}"
VERDICTS = (HOLDS, FAILS, DEPENDS, UNDECIDED, OPEN)
_SAID = ("verdict", "note", "measured", "spread", "how")
DECIDES = "What would decide: "
"""Where `how` ends by saying so."""


@dataclass(frozen=True)
class Outcome:
    """What runs say about a claim.

    note: follows the verdict, such as ": holds on the LSTM". spread: of `measured`, as the evidence says. how:
    workload, links, and by which rule; where empty, it is the catalogue's, filled in with what is `said`. more: what
    would decide it, if not more of the same.
    """

    verdict: str
    note: str = ""
    _: KW_ONLY
    measured: str
    how: str = ""
    spread: str = ""
    more: str = ""
    said: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Row:
    """A claim, when it holds, and what became of it. `command`: what ran, one a line; DATA is the folder of data."""

    id: str
    paper: str
    claim: str
    published: str
    criterion: str
    verdict: str
    note: str
    measured: str
    spread: str
    seeds: tuple[int, ...]
    command: tuple[str, ...]
    how: str


def judged(claim: Claim, outcome: Outcome, seeds: Iterable[int], commands: Iterable[str]) -> Row:
    found: dict[str, Any] = {name: getattr(claim, name) for name in ("id", "paper", "published", "criterion")}
    found |= {name: _RATE.sub(lambda rate: str(parse_rate(rate[0])), getattr(outcome, name)) for name in _SAID}
    ran = tuple(sorted(set(seeds))), tuple(dict.fromkeys(commands))
    return Row(claim=f"{claim.place}: {claim.claim}", seeds=ran[0], command=ran[1], **found)


def unjudged(claim: Claim) -> Row:
    how = f"not yet judged. What would: {claim.check}. Then: {claim.criterion}"
    return judged(claim, Outcome(verdict=OPEN, measured=NOTHING, how=how), (), ())


def read(path: Path = LEDGER) -> dict[str, Row]:
    """Return the rows by id: all claims, the open ones as the catalogue has them. Raises ValueError for no ledger."""
    try:
        written = json.loads(path.read_text())["rows"] if path.exists() else []
        known = {
            row["id"]: Row(**row | {name: tuple(row[name]) for name in ("seeds", "command")})
            for row in written
            if row["verdict"] != OPEN
        }
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is not a ledger ({error!r}); restore it, or name a file that is not there yet"
        ) from error
    for name, row in known.items():
        if name not in catalogue() or row.verdict not in VERDICTS:
            raise ValueError(f"{path} has {name}: {row.verdict!r}; expected claims of the catalogue, and {VERDICTS}")
    return {name: known.get(name, unjudged(claim)) for name, claim in catalogue().items()}


def write(rows: Mapping[str, Row], path: Path = LEDGER, judged_on: Mapping[str, Any] | None = None) -> None:
    """Write all rows, and with which machine and versions they were judged. What ran says itself where it ran."""
    document = {"schema": SCHEMA, "judged_on": judged_on or {}, "rows": [asdict(row) for row in rows.values()]}
    write_atomically(path, json.dumps(document, indent=1, ensure_ascii=False) + "\n")

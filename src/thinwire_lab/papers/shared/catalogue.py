"""The claims of all papers, as each room's claims.toml has them."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

HOUSE = Path(__file__).parents[4] / "papers"
"""Pages, claims, figures and runs: they lie in the checkout, and are not installed."""
ROOMS = ("dragonn", "fft", "s2", "dct", "gtopk")


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
    """Return every claim by its id, in the order of the rooms."""
    return {
        name: Claim(id=name, paper=room, **entry)
        for room in ROOMS
        for name, entry in tomllib.loads((HOUSE / room / "claims.toml").read_text()).items()
    }

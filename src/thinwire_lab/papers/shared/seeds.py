"""The claims that `thinwire_lab.papers.gradients` decides, on three seeds: one outcome of each."""

import re
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from thinwire_lab.papers.shared.claims import UNTESTABLE
from thinwire_lab.papers.shared.ledger import UNDECIDED, Outcome
from thinwire_lab.papers.shared.shelf import Combined, Document

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
    ordered = sorted(numbers, key=_value)
    middle = ordered[len(ordered) // 2]
    return middle if len(set(numbers)) == 1 else f"{middle} ({ordered[0]} to {ordered[-1]})"


def _value(number: str) -> float:
    return float(number.rstrip("%").replace(",", ""))


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

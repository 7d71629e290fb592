"""From intervals to verdicts, by rules that all papers share."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence

from thinwire_lab.papers.shared.ledger import DEPENDS, FAILS, HOLDS, UNDECIDED
from thinwire_lab.papers.shared.trials import Interval

MARGIN = 2.0
"""Percent of the held-out loss within which two trainings are the same, where a claim has no accuracy in points."""
Range = tuple[float, float]
"""The least and the most of repeats, or their 20th and 80th percentile."""
HALF_A_POINT = 0.5
"""Of accuracy: within it two trainings are the same, says the list of claims."""


def verdict(holds: bool) -> str:
    return HOLDS if holds else FAILS


def agreed(holds: Iterable[bool]) -> str:
    """Return what all repeats say: undecided where they disagree."""
    said = set(holds)
    return UNDECIDED if len(said) > 1 else verdict(said == {True})


def no_worse(found: Interval, margin: float = MARGIN) -> str:
    """Whether it is no more than `margin` percent above the other: decided where the whole interval says so."""
    if found.mean + found.half <= margin:
        return HOLDS
    return FAILS if found.mean - found.half > margin else UNDECIDED


def worse(found: Interval, margin: float) -> str:
    """Whether it is above the other: it is not where the interval reaches below 0 and stays within the margin."""
    if found.above:
        return HOLDS
    return FAILS if found.mean + found.half <= margin else UNDECIDED


def rising(parts: Sequence[Interval]) -> str:
    """Whether what grows by these steps rises all along: decided where whole intervals say so."""
    if any(each.below for each in parts):
        return FAILS
    return HOLDS if all(each.above for each in parts) else UNDECIDED


def sooner(mine: Range, other: Range, times: float = 1.0) -> str:
    """Whether what takes this long takes at most `times` as long as the other: undecided where the ranges overlap."""
    (soonest, latest), (others_soonest, others_latest) = mine, other
    if latest < times * others_soonest:
        return HOLDS
    return FAILS if soonest > times * others_latest else UNDECIDED


def larger(mine: Range, other: Range) -> str:
    """Whether it is above the other: undecided where the ranges overlap."""
    return sooner(other, mine)


def every(parts: Mapping[str, str]) -> tuple[str, str]:
    """Return the verdict on a claim all of whose parts must hold, and a note that names the others."""
    for word in (FAILS, UNDECIDED):
        others = [name for name, part in parts.items() if part == word]
        if others:
            return word, "" if len(others) == len(parts) else f": {', '.join(others)}"
    return HOLDS, ""


def any_of(words: Collection[str]) -> str:
    """Return the verdict on a claim that holds if any of its parts does."""
    return next((word for word in (HOLDS, UNDECIDED) if word in words), FAILS)


def by_setting(parts: Mapping[str, str]) -> tuple[str, str]:
    """Return the verdict on a claim made of several settings: it depends where it holds in one and not in another."""
    words = set(parts.values())
    if len(words) == 1:
        return words.pop(), ""
    note = ": " + "; ".join(
        f"{word} on {_listed(name for name, part in parts.items() if part == word)}"
        for word in (HOLDS, FAILS, UNDECIDED)
        if word in words
    )
    return DEPENDS if {HOLDS, FAILS} <= words else UNDECIDED, note


def _listed(names: Iterable[str]) -> str:
    """Return names, one after another; places such as `P = 2 at 1gbit` by link."""
    by_link: dict[str, list[str]] = {}
    for name in names:
        place = re.fullmatch(r"P = (\d+) at (.+)", name)
        by_link.setdefault(place[2] if place else name, []).extend([place[1]] if place else [])
    return ", ".join(f"{link} (P = {', '.join(each)})" if each else link for link, each in by_link.items())

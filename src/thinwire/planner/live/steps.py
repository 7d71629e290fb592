"""What a life is made of."""

from collections.abc import Generator, Mapping
from typing import NamedTuple, TypeVar

from thinwire.planner.candidates import DENSE
from thinwire.planner.live.log import Log

Choice = Mapping[str, str]
"""The candidate's name for each tensor that is compressed."""

_T = TypeVar("_T")


class Decided(NamedTuple):
    """What the next step goes by, and a reason where that has been decided anew."""

    choice: Choice
    reason: str = ""


Life = Generator[Decided, Log, _T]
"""Yields what each step goes by, takes that step's log, and returns what has been found out."""


def steps(choice: Choice, count: int, reason: str = "") -> Life[list[Log]]:
    """Go through so many steps."""
    logs = []
    for index in range(count):
        logs.append((yield Decided(choice, "" if index else reason)))
    return logs


def compressed(choice: Choice) -> Choice:
    """Return the choice without what goes uncompressed."""
    return {name: given for name, given in choice.items() if given != DENSE.name}


def in_words(choice: Choice) -> str:
    """Return how many tensors go by what."""
    given = list(choice.values())
    return " and ".join(f"{given.count(name)} tensors by {name}" for name in dict.fromkeys(given)) or "uncompressed"

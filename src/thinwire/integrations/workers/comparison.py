"""Whether workers have the same global parameters: what each says of them, by the outer step that it has taken."""

import json
import zlib
from collections.abc import Mapping
from typing import final

from thinwire.collectives.links import Words

_KEPT = 8  # outer steps

Digests = Mapping[str, int]
"""Of global parameters, by name."""


@final
class Comparison:
    """Digests of this worker, and of others as they answer. A worker that is elsewhere has fewer steps in common."""

    def __init__(self) -> None:
        self._own: dict[int, Digests] = {}
        self._others: dict[str, tuple[int, Digests]] = {}
        self._number = 0

    @property
    def answered(self) -> set[str]:
        """Who has answered since the last question."""
        return set(self._others)

    def note(self, tick: int, digests: Digests) -> None:
        """Keep what this worker has after the outer step at a tick."""
        self._own[tick] = digests
        for old in sorted(self._own)[:-_KEPT]:
            del self._own[old]

    def digest(self, tick: int) -> int:
        """Return one of all parameters."""
        return zlib.crc32(json.dumps(self._own[tick]).encode())

    def ask(self, tick: int) -> Words:
        """Return a question to others, whose earlier answers no longer count."""
        self._others, self._number = {}, self._number + 1
        return {"kind": "compare", "tick": tick, "number": self._number}

    def answer(self, words: Words) -> tuple[Words, bytes]:
        """Return what to say to a question: what there was at the latest tick up to the asker's."""
        tick = max((each for each in self._own if each <= int(words["tick"])), default=-1)
        said = {"kind": "digests", "tick": tick, "number": words["number"]}
        return said, json.dumps(self._own.get(tick)).encode()

    def take(self, peer: str, words: Words, body: bytes) -> None:
        """Take an answer, unless it is to an earlier question."""
        if words["number"] == self._number:
            self._others[peer] = int(words["tick"]), json.loads(body)

    def differing(self, tick: int, mine: Digests) -> list[str]:
        """Return of which parameters another one's digest differs, if this worker has these at the tick."""
        own = self._own | {tick: mine}
        pairs = [(own[at], theirs) for at, theirs in self._others.values() if at in own]
        return [name for name in mine if any(one[name] != other[name] for one, other in pairs)]


def differently(theirs: str, mine: str) -> str:
    """Say where two texts begin to differ."""
    first = next((at for at, (x, y) in enumerate(zip(theirs, mine, strict=False)) if x != y), 0)
    at = max(0, first - 30)
    return f"…{theirs[at : at + 90]}…, where this one has …{mine[at : at + 90]}…: start all workers with the same"

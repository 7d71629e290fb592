"""What workers tell each other of outer steps: shares, decisions, where each stands, and digests of what it has."""

import json
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple, final

from thinwire.collectives.links import Words

_KEPT = 8  # outer steps whose digests a worker keeps


class Share(NamedTuple):
    """What a worker sends in an outer step. `seconds`: what its inner steps took; `digest`: of where it began."""

    message: bytes
    seconds: float
    digest: int

    @classmethod
    def of(cls, words: Mapping[str, Any], message: bytes) -> "Share":
        """Return what a worker says."""
        return cls(message, float(words["seconds"]), int(words["digest"]))

    def words(self, tick: int, peer: str) -> Mapping[str, Any]:
        """Return what to say of that of a worker at a tick, beside the message."""
        return {"kind": "share", "tick": tick, "id": peer, "seconds": self.seconds, "digest": self.digest}


View = Mapping[str, bool]
"""The electors of an outer step, and whether it waits for their shares."""


class Decision(NamedTuple):
    """Of whose shares the outer step at a tick is made, and the view of the next.

    If it is made of none, it and all others after that at `back` are void.
    """

    tick: int
    shares: tuple[str, ...]
    view: View
    back: int = -1

    @classmethod
    def of(cls, words: Mapping[str, Any]) -> "Decision":
        """Return what another worker, or the store, says."""
        return cls(int(words["tick"]), tuple(map(str, words["shares"])), view_of(words), int(words["back"]))


class Note(NamedTuple):
    """What a store has decided, and in which of its lives; later ones are greater."""

    life: str
    decision: Decision


NOTHING = Note("", Decision(-2, (), {}))
"""Of no step."""


class Standing(NamedTuple):
    """The tick of the latest outer step that a worker has taken, and the seconds that its inner steps took.

    `last`: the latest tick of which it knows a decision; `life`: the store's latest that it knows of; `note`: what that
    has decided of the next step.
    """

    at: int
    seconds: float
    last: int = -1
    life: str = ""
    note: Note = NOTHING

    @classmethod
    def of(cls, words: Mapping[str, Any]) -> "Standing":
        """Return what another worker says."""
        life, decision = words["note"]
        note = Note(str(life), Decision.of(decision))
        return cls(int(words["at"]), float(words["seconds"]), int(words["last"]), str(words["life"]), note)

    def words(self) -> Mapping[str, Any]:
        """Return what to say to others."""
        return self._asdict() | {"note": [self.note.life, self.note.decision._asdict()]}


def view_of(words: Mapping[str, Any]) -> View:
    """Return the view that another worker says."""
    return {str(peer): bool(waits) for peer, waits in words["view"].items()}


Digests = Mapping[str, int]
"""Of global parameters, by name."""


@final
class Comparison:
    """Digests of this worker, and of `others` as they answer. A worker that is elsewhere has fewer steps in common."""

    def __init__(self) -> None:
        self._own: dict[int, Digests] = {}
        self.others: dict[str, tuple[int, Digests]] = {}
        self._number = 0

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
        self.others, self._number = {}, self._number + 1
        return {"kind": "compare", "tick": tick, "number": self._number}

    def answer(self, words: Words) -> tuple[Words, bytes]:
        """Return what to say to a question: what there was at the latest tick up to the asker's."""
        tick = max((each for each in self._own if each <= int(words["tick"])), default=-1)
        said = {"kind": "digests", "tick": tick, "number": words["number"]}
        return said, json.dumps(self._own.get(tick)).encode()

    def take(self, peer: str, words: Words, body: bytes) -> None:
        """Take an answer, unless it is to an earlier question."""
        if words["number"] == self._number:
            self.others[peer] = int(words["tick"]), json.loads(body)

    def differing(self, tick: int, mine: Digests) -> list[str]:
        """Return of which parameters another one's digest differs, if this worker has these at the tick."""
        own = self._own | {tick: mine}
        pairs = [(own[at], theirs) for at, theirs in self.others.values() if at in own]
        return [name for name in mine if any(one[name] != other[name] for one, other in pairs)]

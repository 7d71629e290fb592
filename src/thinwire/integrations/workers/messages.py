"""What workers tell each other of outer steps: shares, decisions, and where each stands."""

from collections.abc import Mapping
from typing import Any, NamedTuple


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

"""Notes that a codec keeps about each parameter."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self, final

import torch
from torch import Tensor

from thinwire.memories.base import Memory, State
from thinwire.payloads import Payload
from thinwire.signals import Note, Signal


@final
@dataclass(kw_only=True)
class Noted(Memory):
    """`memory`, and one small tensor per parameter in which the codec carries something to the next step.

    A threshold, or PowerSGD's factor. Like all that waits, a note of a step that is called off is forgotten.
    """

    memory: Memory
    free: ClassVar[frozenset[str]] = frozenset({"note"})

    _committed: dict[str, Tensor] = field(default_factory=dict, init=False, repr=False)
    _staged: dict[str, Tensor] = field(default_factory=dict, init=False, repr=False)

    @property
    def fields(self) -> frozenset[str]:  # type: ignore[override]  # those of the memory within, and one more
        """The names that `state` may hold under a parameter."""
        return self.memory.fields | self.free

    @property
    def parts(self) -> Sequence[Memory]:
        """This, and the memory within."""
        return (self, *self.memory.parts)

    def blank(self) -> Self:
        """Return one with nothing in it or in the memory within."""
        return replace(self, memory=self.memory.blank())

    def held(self, dtype: torch.dtype) -> torch.dtype:
        """Return what the memory within does."""
        return self.memory.held(dtype)

    def compensate(self, name: str, gradient: Tensor, scale: float, *, seed: int = 0) -> Signal:
        """Return what the memory within does, with its note."""
        signal = self.memory.compensate(name, gradient, scale, seed=seed)
        signal.note = self.note(name)
        return signal

    def note(self, name: str) -> Note:
        """Return the note on parameter `name`."""
        return _Note(self._committed, self._staged, name)

    def retain(self, names: Sequence[str], delivered: Payload) -> None:
        """Hand on."""
        self.memory.retain(names, delivered)

    def commit(self, names: Collection[str] | None = None) -> None:
        """Keep what was staged."""
        self.memory.commit(names)
        for name in self._written(names):
            self._committed[name] = self._staged.pop(name)

    def rollback(self, names: Collection[str] | None = None) -> None:
        """Drop what was staged."""
        self.memory.rollback(names)
        for name in self._written(names):
            del self._staged[name]

    def _written(self, names: Collection[str] | None) -> set[str]:
        return set(self._staged) if names is None else self._staged.keys() & set(names)

    def rescale(self, factor: float) -> None:
        """Multiply what waits, and the notes."""
        self.memory.rescale(factor)
        for note in self._committed.values():
            note.mul_(factor)

    def state(self) -> State:
        """Return what the memory within does, and {name: {"note": tensor}}."""
        within, notes = self.memory.state(), self._committed
        return {n: within.get(n, {}) | ({"note": notes[n]} if n in notes else {}) for n in within | notes}

    def restore(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Take over what waits, and the notes."""
        within = {n: {f: x for f, x in fields.items() if f != "note"} for n, fields in state.items()}
        self.memory.restore({n: fields for n, fields in within.items() if fields})
        self._committed.clear()
        self._committed.update({n: fields["note"].detach().clone() for n, fields in state.items() if "note" in fields})
        self._staged.clear()


@final
class _Note:
    def __init__(self, committed: Mapping[str, Tensor], staged: dict[str, Tensor], name: str) -> None:
        self._committed, self._staged, self._name = committed, staged, name

    def read(self) -> Tensor | None:
        """Return what was written last, by a step that was kept or by an earlier part of this one."""
        return self._staged.get(self._name, self._committed.get(self._name))

    def write(self, note: Tensor) -> None:
        """Stage a note."""
        self._staged[self._name] = note

"""Notes that a codec keeps about each parameter."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self, final

import torch
from torch import Tensor
from typing_extensions import override

from thinwire.checked import checked
from thinwire.kernels.parts import Ints, Vectors
from thinwire.memories.base import Memory, State
from thinwire.memories.staged import among
from thinwire.payloads import Payload, Scratch
from thinwire.signals import Note, Signals


@final
@checked
@dataclass(kw_only=True)
class Noted(Memory):
    """Wraps another memory, and keeps one small tensor per parameter that a codec carries over to the next step.

    Examples are a threshold and PowerSGD's factor. If a step is rolled back, its notes are too. On a GPU, a bucket with
    notes is launched kernel by kernel: a graph would read and write them where the captured step had them.

    Args:
        memory: Holds the residual.
    """

    memory: Memory
    free: ClassVar[frozenset[str]] = frozenset({"note"})

    _committed: dict[str, Tensor] = field(default_factory=dict, init=False, repr=False)
    _staged: dict[str, Tensor] = field(default_factory=dict, init=False, repr=False)

    @property
    @override
    def fields(self) -> frozenset[str]:
        return self.memory.fields | self.free

    @property
    def residual(self) -> str:  # type: ignore[override]
        """The inner memory's field that waits to be sent."""
        return self.memory.residual

    @property
    @override
    def parts(self) -> Sequence[Memory]:
        return (self, *self.memory.parts)

    @override
    def blank(self) -> Self:
        return replace(self, memory=self.memory.blank())

    @override
    def fresh(self) -> Self:
        return replace(self, memory=self.memory.fresh())

    @property
    @override
    def scratch(self) -> Scratch:
        return self.memory.scratch

    @override
    def held(self, dtype: torch.dtype) -> torch.dtype:
        return self.memory.held(dtype)

    @override
    def compensate_each(self, names: Sequence[str], gradients: Vectors, scale: float, seeds: Ints) -> Signals:
        signals = self.memory.compensate_each(names, gradients, scale, seeds)
        for signal, name in zip(signals, names, strict=True):
            signal.note = self.note(name)
        return signals

    def note(self, name: str) -> Note:
        """Return the note on parameter `name`."""
        return Note(self._committed, self._staged, name)

    @override
    def retain(self, names: Sequence[str], delivered: Payload) -> None:
        self.memory.retain(names, delivered)

    @override
    def commit(self, names: Collection[str] | None = None) -> None:
        self.memory.commit(names)
        for name in among(self._staged, names):
            self._committed[name] = self._staged.pop(name)

    @override
    def rollback(self, names: Collection[str] | None = None) -> None:
        self.memory.rollback(names)
        for name in among(self._staged, names):
            del self._staged[name]

    @override
    def rescale(self, factor: float) -> None:
        self.memory.rescale(factor)
        for note in self._committed.values():
            note.mul_(factor)

    def state(self) -> State:
        """Return the inner memory's state, with {name: {"note": tensor}} added."""
        within, notes = self.memory.state(), self._committed
        return {n: within.get(n, {}) | ({"note": notes[n]} if n in notes else {}) for n in within | notes}

    @override
    def restore(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        within = {n: {f: x for f, x in fields.items() if f != "note"} for n, fields in state.items()}
        self.memory.restore({n: fields for n, fields in within.items() if fields})
        self._committed.clear()
        self._committed.update({n: fields["note"].detach().clone() for n, fields in state.items() if "note" in fields})
        self._staged.clear()

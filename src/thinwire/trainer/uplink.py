"""What a trainer sends up: gradients through a recipe's memory and codec."""

import random
from collections.abc import Mapping
from typing import final

import torch
from torch import Tensor

from thinwire import trace
from thinwire.handle import MemoryUse
from thinwire.payloads import Dense
from thinwire.reducer import Reducer, Segment
from thinwire.reducer.compressed import encoded
from thinwire.wire.layout import Entry, Layout, Part, table
from thinwire.wire.terms import check_memories

_CPU = torch.device("cpu")


@final
class Uplink:
    """A recipe's memory and codec between gradients and updates' bodies; not thread-safe; `who` seeds its own draws."""

    def __init__(self, recipe: Reducer, layout: Layout, who: str, device: torch.device = _CPU) -> None:
        check_memories(recipe)
        self._recipe, self._layout, self._who, self._device = recipe, layout, who, device
        self._scratch = 0

    @property
    def memory(self) -> MemoryUse:
        """The residual, and the most that encoding the latest update took."""
        waiting = sum(memory.nbytes for memory in self._recipe.memories())
        return MemoryUse(waiting, staging=0, scratch=self._scratch)

    def encode(self, number: int, gradients: Mapping[str, Tensor], *, drain: bool) -> list[Tensor]:
        """Return the sections of update `number`; what they do not deliver goes into the residual, all out if they
        `drain`.

        Gradients are read, not kept; zeros for those missing. Raises TypeError, with nothing changed, for gradients
        that are sparse where the layout's are not, or the other way round.
        """
        self.check(gradients)
        with trace.span("encode"):
            return self._sections(number, gradients, drain=drain)

    def check(self, gradients: Mapping[str, Tensor]) -> None:
        """Raise TypeError for gradients that are sparse where the layout's are not, or the other way round."""
        rows = {entry.name for entry in self._layout.rows}
        for name in (*rows, *(segment.name for _, segment in self._layout.segments())):
            gradient = gradients.get(name)
            if gradient is not None and gradient.is_sparse != (name in rows):
                raise TypeError(
                    f"{name} got a {'sparse' if gradient.is_sparse else 'dense'} gradient; expected a "
                    f"{'sparse' if name in rows else 'dense'} one: rows are sent for nn.Embedding(sparse=True) whose "
                    "weight is used nowhere else"
                )

    def _sections(self, number: int, gradients: Mapping[str, Tensor], *, drain: bool) -> list[Tensor]:
        parts = self._layout.of_recipe(self._recipe, number - 1)
        if drain:
            released = {s.name: self._released(s, part, gradients) for part in parts for s in part.segments}
            whole = [torch.cat([released[s.name] for s in part.segments]) for part in self._layout.dense]
            sections = [Dense(values=x).to_buffer().cpu() for x in whole]
        else:
            sections = [self._encoded(part, number, gradients) for part in parts]
        for memory in {id(part.memory): part.memory for part in parts}.values():
            memory.commit()
        return [*sections, *(_rows(entry, gradients.get(entry.name)) for entry in self._layout.rows)]

    def _encoded(self, part: Part, number: int, gradients: Mapping[str, Tensor]) -> Tensor:
        payloads = []
        for segment in part.segments:
            gradient = self._flat(gradients.get(segment.name), segment, part.dtype)
            seed = part.draw(segment, number, self._who)
            signal = part.memory.compensate(segment.name, gradient, 1.0, seed=seed)
            signal.share, signal.shape = 1.0 if part.memory.stateful else None, segment.shape
            payloads.append(encoded(part.codec, signal, seed=seed))
        whole = part.assembled(payloads)
        lengths, values = [segment.length for segment in part.segments], whole.values.numel()
        rules = (part.codec.scratch, part.memory.scratch, whole.scratch)
        self._scratch = max(self._scratch, *(rule.nbytes(lengths, values) for rule in rules))
        sent = whole.to_buffer().cpu()  # first: a payload may be a view of what waits
        if part.memory.stateful:
            part.memory.retain([segment.name for segment in part.segments], whole)
        return sent

    def _released(self, segment: Segment, part: Part, gradients: Mapping[str, Tensor]) -> Tensor:
        """Return a gradient and all that waits for it."""
        total = self._flat(gradients.get(segment.name), segment, part.dtype).clone()
        for each in part.memory.parts:
            if each.releases and each.waits(segment.name):
                each.release(segment.name, total, 1.0)
        return total

    def _flat(self, gradient: Tensor | None, segment: Segment, dtype: torch.dtype) -> Tensor:
        if gradient is None:
            return torch.zeros(segment.length, dtype=dtype, device=self._device)
        return gradient.reshape(-1)


def drainable(recipe: Reducer) -> bool:
    """Whether all that waits in this recipe's memories can go out at once."""
    return all(any(part.releases for part in memory.parts) for memory in recipe.memories() if memory.stateful)


@final
class Draining:
    """Says at which updates to drain: at random, every `every` updates on average, the same for the same seed."""

    def __init__(self, every: int | None, seed: int) -> None:
        self._every, self._random = every, random.Random(seed)

    def due(self) -> bool:
        """Whether the next update drains. Call it once for each."""
        return self._every is not None and self._random.random() * self._every < 1


def _rows(entry: Entry, gradient: Tensor | None) -> Tensor:
    if gradient is None:
        none = torch.zeros((0, *entry.shape[1:]), dtype=entry.dtype)
        keys = torch.zeros((1, 0), dtype=torch.int64)
        gradient = torch.sparse_coo_tensor(keys, none, entry.shape, check_invariants=False)
    gradient = gradient.coalesce()
    return table(entry, gradient.indices()[0], gradient.values()).to_buffer().cpu()

"""What a trainer sends up: gradients through a recipe's memory and codec."""

from collections.abc import Mapping
from typing import final

import torch
from torch import Tensor

from thinwire import trace
from thinwire.reducer import Bucket, Reducer
from thinwire.reducer.wrappers import release
from thinwire.wire.entries import Entry, table
from thinwire.wire.layout import Layout


@final
class Uplink:
    """A recipe's memory and codec between gradients and updates' bodies; not thread-safe; `who` seeds its own draws."""

    def __init__(self, layout: Layout, who: str, device: torch.device | None = None) -> None:
        self._layout, self._who, self.scratch = layout, who, 0
        self._flats, self._views = layout.flats(device)
        self.staged = sum(flat.nbytes for flat in self._flats.values())

    def encode(self, number: int, gradients: Mapping[str, Tensor], *, drain: bool) -> list[Tensor]:
        """Return the sections of update `number`; what they do not deliver goes into the residual.

        If they `drain`, all of the residual goes out. Gradients are read, not kept; zeros for those missing.
        """
        with trace.span("encode"):
            for name, view in self._views.items():
                view.zero_() if (gradient := gradients.get(name)) is None else view.copy_(gradient)
            memories, parts, sections = self._layout.recipe.memories(), self._layout.up(number), list[Tensor]()
            if drain:
                parts = self._layout.dense
                for dtype, segment in self._layout.segments:
                    release(memories, Bucket(flat=self._flats[dtype], segments=[segment]), 1.0)
            for part in parts:
                bucket = part.bucket(self._flats[part.dtype])
                payload = part.encode(bucket, number, self._who)
                self.scratch = max(self.scratch, part.way.most(bucket, payload, number - 1))
                sections.append(payload.packed.cpu())
            for memory in memories:
                memory.commit()
            return [*sections, *(_rows(entry, gradients.get(entry.name)) for entry in self._layout.rows)]

    def check(self, gradients: Mapping[str, Tensor]) -> None:
        """Raise TypeError for gradients that are sparse where the layout's are not, or the other way round."""
        for entry in self._layout.parameters:
            gradient = gradients.get(entry.name)
            if gradient is not None and gradient.is_sparse != entry.rows:
                raise TypeError(
                    f"{entry.name} got a {'sparse' if gradient.is_sparse else 'dense'} gradient; expected a "
                    f"{'sparse' if entry.rows else 'dense'} one: rows are sent for nn.Embedding(sparse=True) whose "
                    "weight is used nowhere else"
                )


def drainable(recipe: Reducer) -> bool:
    """Whether all that waits in this recipe's memories can go out at once."""
    return all(any(part.releases for part in memory.parts) for memory in recipe.memories() if memory.stateful)


def _rows(entry: Entry, gradient: Tensor | None) -> Tensor:
    if gradient is None:
        return table(entry, torch.empty(0), torch.empty(0, dtype=entry.dtype))
    gradient = gradient.coalesce()
    return table(entry, gradient.indices()[0], gradient.values())

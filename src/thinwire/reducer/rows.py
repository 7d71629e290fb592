"""Gradients of sparse embeddings: some rows of a table."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor
from torch.futures import Future
from typing_extensions import override

from thinwire import trace
from thinwire.checked import checked
from thinwire.collectives import Group
from thinwire.exchanges import Exchange, Exchanged
from thinwire.payloads import Blocks, Keyed
from thinwire.reducer.base import Reducer, Round, Segment, note_rows
from thinwire.reducer.wrappers import Routing


@final
@checked
@dataclass(frozen=True, kw_only=True)
class WithRows(Routing):
    """Send the rows of sparse embeddings' gradients through `rows`, an exchange of tables; `dense` does the rest."""

    rows: Exchange
    dense: Reducer

    def __post_init__(self) -> None:
        if not self.rows.uneven:
            raise TypeError(
                f"{self.rows} needs the same number of rows from all ranks, and sparse embeddings have different "
                "ones; use UnionAllReduce, OwnerSharded or RecursiveDoubling"
            )

    @override
    def children(self) -> Sequence[Reducer]:
        return (self.dense,)

    @override
    def child_of(self, segment: Segment, step: float) -> Reducer:
        return self.dense

    @override
    def rebuilt(self, change: Callable[[Reducer], Reducer]) -> Reducer:
        return replace(self, dense=self.dense.rebuilt(change))

    @override
    def prepare(self, group: Group, samples: Sequence[Tensor] = ()) -> None:
        self.rows.prepare(group)
        super().prepare(group, samples)

    def reduce_rows(self, gradient: Tensor, name: str, at: Round) -> "Future[Tensor]":
        """Start the exchange. Ranks may hold different rows, and different numbers of them."""
        listeners = at.listeners
        with trace.span("encode", *listeners):
            gradient = gradient.coalesce()
            note_rows(gradient, at)
            values = gradient.values() * at.scale
            width = values[0].numel() if len(values) else gradient.shape[1:].numel()
            keys = gradient.indices()[0].to(torch.int32)
            table = Blocks(keys=keys, values=values.reshape(-1), numel=gradient.shape[0] * width, width=width)
        shape = gradient.shape
        start = trace.now()
        future = self.rows.start(table, at.group, seeds=[at.seed(name)])

        def finish(done: "Future[Exchanged]") -> Tensor:
            exchanged = done.value()  # raises what the exchange raised
            trace.took("exchange", start, listeners)
            trace.count("sent_bytes", exchanged.sent_bytes, *listeners)
            with trace.span("decode", *listeners):
                return _sparse(exchanged, shape)

        return future.then(finish)


def _sparse(exchanged: Exchanged, shape: torch.Size) -> Tensor:
    total = exchanged.total
    assert isinstance(total, Keyed)
    rows = total.rows.reshape(-1, *shape[1:])
    keys = total.keys[None].long()
    return torch.sparse_coo_tensor(keys, rows, shape, is_coalesced=True, check_invariants=False)

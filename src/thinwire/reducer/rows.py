"""Gradients of sparse embeddings: some rows of a table."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor
from torch.futures import Future

from thinwire import trace
from thinwire.checked import checked
from thinwire.collectives import Group
from thinwire.exchanges import Exchange, Exchanged
from thinwire.memories import Memory
from thinwire.payloads import Blocks, Keyed
from thinwire.reducer.base import Bucket, Mean, Reducer, Round, Segment, note_rows


@final
@checked
@dataclass(frozen=True, kw_only=True)
class WithRows(Reducer):
    """Send the rows of sparse embeddings' gradients through `rows`, an exchange of tables; `dense` does the rest."""

    rows: Exchange
    dense: Reducer

    def __post_init__(self) -> None:
        if not self.rows.uneven:
            raise TypeError(
                f"{self.rows} needs as many rows from each rank, and embeddings have not; use UnionAllReduce, "
                "OwnerSharded or RecursiveDoubling"
            )

    def prepare(self, group: Group, samples: Sequence[Tensor] = ()) -> None:
        """Prepare both."""
        self.rows.prepare(group)
        self.dense.prepare(group, samples)

    def reduce(self, bucket: Bucket, at: Round) -> "Future[Mean]":
        """Hand over to `dense`."""
        return self.dense.reduce(bucket, at)

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
        arrived = trace.started("exchange", *listeners)
        future = self.rows.start(table, at.group, seeds=[at.seed(name)])

        def finish(done: "Future[Exchanged]") -> Tensor:
            exchanged = done.value()  # raises what the exchange raised
            arrived()
            trace.count("sent_bytes", exchanged.sent_bytes, *listeners)
            with trace.span("decode", *listeners):
                return _sparse(exchanged, shape)

        return future.then(finish)

    def memories(self) -> Sequence[Memory]:
        """Return the memories of `dense`."""
        return self.dense.memories()

    def memory_of(self, segment: Segment) -> Memory:
        """Return what `dense` says."""
        return self.dense.memory_of(segment)


def _sparse(exchanged: Exchanged, shape: torch.Size) -> Tensor:
    total = exchanged.total
    assert isinstance(total, Keyed)
    rows = total.rows.reshape(-1, *shape[1:])
    keys = total.keys[None].long()
    return torch.sparse_coo_tensor(keys, rows, shape, is_coalesced=True, check_invariants=False)

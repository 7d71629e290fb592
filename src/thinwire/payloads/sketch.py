"""Count sketches: tables that can be added."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, NamedTuple, Self, final

import torch
from torch import Tensor
from typing_extensions import override

from thinwire import kernels
from thinwire.payloads import numbers, wire
from thinwire.payloads.base import Regional, Regions


class SketchTable(NamedTuple):
    """The shape of one vector's sketch, and the seed of its hashes."""

    rows: int
    cells: int
    seed: int


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Sketch(Regional):
    """One table per region: S[j, h_j(i)] = Σ s_j(i) · x[i] (Charikar et al. 2002).

    The estimate of element i is the median over j of s_j(i) · S[j, h_j(i)].

    Args:
        values: The tables, one after the other.
        tables: Their shapes and hashes, which all ranks must share.
        numel: Elements of the whole vector.
        regions: (offset, length) of each part that it covers; by default one, the whole vector.
    """

    values: Tensor
    tables: tuple[SketchTable, ...]
    numel: int
    regions: Regions = field(default=())

    summable: ClassVar[bool] = True  # always: the sum of sketches is the sketch of the sum

    @property
    @override
    def nbytes(self) -> int:
        return wire.HEADER_BYTES + wire.padded(self.values.nbytes)

    @override
    def counts(self) -> list[int]:
        return [table.rows * table.cells for table in self.tables]

    @override
    def with_values(self, values: Tensor) -> Self:
        return replace(self, values=values)

    @override
    def to_buffer(self) -> Tensor:
        return wire.pack(self._head(), self.values)

    @override
    def from_buffers(self, buffers: Tensor) -> Self:
        wire.check_buffers(buffers, self._head(), self.values.nbytes)
        tables = numbers.plain(buffers[:, wire.HEADER_BYTES :], self.values.numel(), self.values.dtype)
        return self.with_values(kernels.row_sums(tables))

    @classmethod
    @override
    def assemble(cls, parts: Sequence[Self], offsets: Sequence[int], numel: int) -> Self:
        return cls(
            values=torch.cat([part.values for part in parts]),
            tables=tuple(table for part in parts for table in part.tables),
            numel=numel,
            regions=tuple((offset, part.numel) for offset, part in zip(offsets, parts, strict=True)),
        )

    @override
    def vectors(self) -> list[Tensor]:
        parts = zip(self.regions, self.tables, self.values.split(self.counts()), strict=True)
        return [
            kernels.sketch_query(values.view(table.rows, table.cells), length, table.seed)
            for (_, length), table, values in parts
        ]

    def _head(self) -> bytes:
        return numbers.header(wire.DENSE, self.values, None, self.values.numel(), self.values.numel())

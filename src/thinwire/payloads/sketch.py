"""Count sketches: tables that can be added."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, NamedTuple, Self, final

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.payloads import numbers, wire
from thinwire.payloads.base import Payload, Regions, regions_are_finite


class SketchTable(NamedTuple):
    """The shape of one vector's sketch, and the seed of its hashes."""

    rows: int
    cells: int
    seed: int


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Sketch(Payload):
    """One table per region: S[j, h_j(i)] = Σ s_j(i) · x[i] (Charikar et al. 2002).

    The estimate of element i is the median over j of s_j(i) · S[j, h_j(i)].

    Args:
        values: The tables, one after the other.
        tables: Their shapes and hashes, which all ranks must share.
    """

    values: Tensor
    tables: tuple[SketchTable, ...]
    numel: int
    regions: Regions = field(default=())

    def __post_init__(self) -> None:
        object.__setattr__(self, "regions", self.regions or ((0, self.numel),))

    summable: ClassVar[bool] = True  # always: the sum of sketches is the sketch of the sum

    @property
    def nbytes(self) -> int:
        """Length of `to_buffer()` in bytes."""
        return wire.HEADER_BYTES + wire.padded(self.values.nbytes)

    def counts(self) -> list[int]:
        """Return the sizes of the tables."""
        return [table.rows * table.cells for table in self.tables]

    def with_values(self, values: Tensor) -> Self:
        """Return a sketch of the same shape and hashes with other tables."""
        return replace(self, values=values)

    def to_buffer(self) -> Tensor:
        """Return header and tables as uint8."""
        return wire.pack(self._head(), self.values)

    def from_buffers(self, buffers: Tensor) -> Self:
        """Return the sum over ranks."""
        wire.check_buffers(buffers, self._head(), self.nbytes)
        tables = numbers.plain(buffers[:, wire.HEADER_BYTES :], self.values.numel(), self.values.dtype)
        return self.with_values(kernels.row_sums(tables))

    def write(self, out: Tensor) -> None:
        """Overwrite the regions of `out` with the estimates."""
        for (offset, length), estimate in zip(self.regions, self._estimates(), strict=True):
            out[offset : offset + length].copy_(estimate)

    def subtract_from(self, parts: Sequence[Tensor]) -> None:
        """Subtract each region's estimate from its part."""
        for part, estimate in zip(parts, self._estimates(), strict=True):
            part.sub_(estimate)

    def mask(self, parts: Sequence[Tensor | None]) -> None:
        """Do nothing: no element was picked out."""

    def is_finite(self, out: Tensor) -> bool:
        """Whether the regions of `out` are finite."""
        return regions_are_finite(out, self.regions)

    @classmethod
    def assemble(cls, parts: Sequence[Self], offsets: Sequence[int], numel: int) -> Self:
        """Place vectors side by side, each with its own table."""
        return cls(
            values=torch.cat([part.values for part in parts]),
            tables=tuple(table for part in parts for table in part.tables),
            numel=numel,
            regions=tuple((offset, part.numel) for offset, part in zip(offsets, parts, strict=True)),
        )

    @classmethod
    def concat(cls, payloads: Sequence[Self]) -> Self:
        """Return the sum of sketches with the same hashes."""
        stacked = torch.stack([p.values for p in payloads])
        return payloads[0].with_values(kernels.row_sums(stacked))

    def _values(self) -> tuple[Tensor, ...]:
        return self.values.split(self.counts())

    def _estimates(self) -> list[Tensor]:
        parts = zip(self.regions, self.tables, self._values(), strict=True)
        return [
            kernels.sketch_query(values.view(table.rows, table.cells), length, table.seed)
            for (_, length), table, values in parts
        ]

    def _head(self) -> Tensor:
        return numbers.header(wire.DENSE, self.values, None, self.values.numel(), self.values.numel())

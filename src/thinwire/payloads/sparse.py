"""Single elements by index."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Self, final

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.errors import PayloadError
from thinwire.payloads import wire
from thinwire.payloads.base import Payload, Spans


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Sparse(Payload):
    """Values at int32 `indices`; elements of the spans that are not named are zero.

    `runs` are the lengths of stretches within which no index occurs twice, except as padding with value 0. `agreed`
    says that every rank holds these very indices, so that values alone need to travel.
    """

    indices: Tensor
    values: Tensor
    numel: int
    spans: Spans = field(default=())
    runs: tuple[int, ...] = field(default=())
    agreed: bool = False

    def __post_init__(self) -> None:
        if self.numel > 2**31 - 1:
            raise PayloadError(f"{self.numel} elements; int32 indices reach 2³¹ - 1: use smaller buckets")
        if self.indices.shape != self.values.shape or self.indices.dtype != torch.int32:
            raise PayloadError(f"{self.values.numel()} values for {self.indices.numel()} {self.indices.dtype} indices")
        object.__setattr__(self, "spans", self.spans or ((0, self.numel),))
        object.__setattr__(self, "runs", self.runs or (self.values.numel(),))

    @property
    def summable(self) -> bool:
        """Whether all ranks agreed on the indices beforehand."""
        return self.agreed

    @property
    def nbytes(self) -> int:
        """Length of `to_buffer()` in bytes."""
        return wire.HEADER_BYTES + wire.padded(self.values.nbytes) + wire.padded(self.indices.nbytes)

    def with_values(self, values: Tensor) -> Self:
        """Return the same indices with other values."""
        return replace(self, values=values)

    def to_buffer(self) -> Tensor:
        """Return header, values and indices as uint8."""
        return wire.pack(self._header(), self.values, self.indices)

    @classmethod
    def from_buffer(cls, buffer: Tensor) -> "Sparse":
        """Read what `to_buffer` wrote, as one span. Raises PayloadError when malformed."""
        dtype, count, numel = wire.parse(buffer, wire.SPARSE)
        expected = wire.HEADER_BYTES + wire.padded(count * dtype.itemsize) + wire.padded(count * 4)
        if count > numel or buffer.numel() != expected:
            raise PayloadError(f"{count} of {numel} elements in {buffer.numel()} bytes; expected {expected} bytes")
        wire.check_padding(buffer, count * dtype.itemsize, count * 4)
        values, indices = _sections(buffer[None], count, dtype)
        _check_range(indices, numel)
        return cls(indices=indices, values=values, numel=numel)

    def from_rows(self, rows: Tensor) -> Self:
        """Return the sum over ranks of buffers like this payload's: their elements one after the other."""
        wire.check_rows(rows, self._header())
        values, indices = _sections(rows, self.values.numel(), self.values.dtype)
        _check_range(indices, self.numel)
        return replace(self, indices=indices, values=values, runs=self.runs * rows.shape[0])

    def write(self, out: Tensor) -> None:
        """Set the spans of `out` to zero and add the values."""
        for offset, length in self.spans:
            out[offset : offset + length].zero_()
        self._add(out, 1.0)

    def subtract_from(self, x: Tensor) -> None:
        """Subtract the values from `x`."""
        self._add(x, -1.0)

    def mask(self, x: Tensor) -> None:
        """Set `x` to zero at every index that carries a value other than 0."""
        kernels.backend(x).mask(x, self.indices, self.values)

    def is_finite(self, out: Tensor) -> bool:
        """Whether `out` is finite at every index."""
        return bool(out.index_select(0, self.indices).isfinite().all())

    @classmethod
    def assemble(cls, parts: Sequence[Self], offsets: Sequence[int], numel: int) -> Self:
        """Place vectors side by side."""
        return cls(
            indices=torch.cat([part.indices + offset for part, offset in zip(parts, offsets, strict=True)]),
            values=torch.cat([part.values for part in parts]),
            numel=numel,
            spans=tuple((offset, part.numel) for part, offset in zip(parts, offsets, strict=True)),
            runs=tuple(part.values.numel() for part in parts),
            agreed=all(part.agreed for part in parts),
        )

    def split(self) -> list[Self]:
        """Return one payload per span."""
        parts = zip(self.spans, self.indices.split(self.runs), self.values.split(self.runs), strict=True)
        return [
            replace(self, indices=index - offset, values=value, numel=length, spans=(), runs=())
            for (offset, length), index, value in parts
        ]

    @classmethod
    def concat(cls, payloads: Sequence[Self]) -> Self:
        """Return the sum of payloads over the same space: the elements of all of them."""
        return replace(
            payloads[0],
            indices=torch.cat([p.indices for p in payloads]),
            values=torch.cat([p.values for p in payloads]),
            runs=tuple(run for p in payloads for run in p.runs),
            agreed=False,
        )

    def _add(self, out: Tensor, sign: float) -> None:
        kernels.backend(out).scatter_add(out, self.indices, self.values, self.runs, sign)

    def _header(self) -> Tensor:
        return wire.header(wire.SPARSE, self.values.dtype, self.values.numel(), self.numel, self.values.device)


def _sections(rows: Tensor, count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    values = rows[:, wire.HEADER_BYTES :][:, : count * dtype.itemsize]
    start = wire.HEADER_BYTES + wire.padded(count * dtype.itemsize)
    indices = rows[:, start : start + 4 * count]
    return values.reshape(-1).view(dtype), indices.reshape(-1).view(torch.int32)


def _check_range(indices: Tensor, numel: int) -> None:
    if indices.numel():
        low, high = (int(bound) for bound in torch.aminmax(indices))
        if low < 0 or high >= numel:
            raise PayloadError(f"indices reach from {low} to {high}; expected 0 to {numel - 1}")

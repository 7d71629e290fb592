"""Single elements by index."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Self, final

import torch
from torch import Tensor
from torch.nn.functional import pad

from thinwire import kernels
from thinwire.errors import PayloadError
from thinwire.formats import Coded
from thinwire.payloads import numbers, wire
from thinwire.payloads.base import Spans
from thinwire.payloads.keyed import Keyed


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Sparse(Keyed):
    """Values at int32 `indices`; elements of the spans that are not named are zero.

    `runs` are the lengths of stretches within which no index occurs twice, except as padding with value 0. `agreed`
    says that every rank holds these very indices, so that values alone need to travel. With `coded`, codes travel, and
    `values` are what they stand for.
    """

    indices: Tensor
    values: Tensor
    numel: int
    spans: Spans = field(default=())
    runs: tuple[int, ...] = field(default=())
    agreed: bool = False
    coded: Coded | None = None

    def __post_init__(self) -> None:
        if self.numel > 2**31 - 1:
            raise PayloadError(f"{self.numel} elements; int32 indices reach 2³¹ - 1: use smaller buckets")
        if self.indices.shape != self.values.shape or self.indices.dtype != torch.int32:
            raise PayloadError(f"{self.values.numel()} values for {self.indices.numel()} {self.indices.dtype} indices")
        object.__setattr__(self, "spans", self.spans or ((0, self.numel),))
        object.__setattr__(self, "runs", self.runs or (self.values.numel(),))

    @property
    def summable(self) -> bool:
        """Whether all ranks agreed on the indices beforehand, and values travel as such."""
        return self.agreed and self.coded is None

    @property
    def keys(self) -> Tensor:  # type: ignore[override]  # a table of one column
        """The indices."""
        return self.indices

    @property
    def rows(self) -> Tensor:
        """The values, one to a row."""
        return self.values[:, None]

    @property
    def key_space(self) -> int:
        """One row for each element."""
        return self.numel

    @property
    def nbytes(self) -> int:
        """Length of `to_buffer()` in bytes."""
        return wire.HEADER_BYTES + numbers.nbytes(self.values, self.coded) + wire.padded(self.indices.nbytes)

    def with_values(self, values: Tensor) -> Self:
        """Return the same indices with other values."""
        return replace(self, values=values, coded=None)

    @property
    def most_rows(self) -> int:
        """How many elements the spans have."""
        return sum(length for _, length in self.spans)

    def every_key(self) -> Tensor:
        """Return all indices within the spans."""
        device = self.values.device
        return torch.cat([torch.arange(o, o + n, dtype=torch.int32, device=device) for o, n in self.spans])

    def span_counts(self) -> list[int]:
        """Return how many elements lie in each span."""
        return list(self.runs)

    def rekeyed(self, keys: Tensor, rows: Tensor) -> Self:
        """Return other elements of the same vector; those outside the spans are left out."""
        order, runs = _by_span(keys, self.spans)
        values = rows.view(-1).index_select(0, order)
        return replace(self, indices=keys.index_select(0, order), values=values, runs=runs, agreed=False, coded=None)

    def filled(self, count: int) -> Self:
        """Return this with padding, index 0 and value 0, up to `count` elements."""
        missing = (0, count - self.values.numel())
        return replace(
            self, indices=pad(self.indices, missing), values=pad(self.values, missing), runs=(count,), coded=None
        )

    def to_buffer(self) -> Tensor:
        """Return header, values and indices as uint8."""
        return wire.pack(self._header(), *numbers.sections(self.values, self.coded), self.indices)

    @classmethod
    def from_buffer(cls, buffer: Tensor) -> "Sparse":
        """Read what `to_buffer` wrote, as one span. Raises PayloadError when malformed."""
        found, count, numel = wire.parse(buffer, wire.SPARSE)
        dtype = numbers.check_plain(found)
        expected = wire.HEADER_BYTES + wire.padded(count * dtype.itemsize) + wire.padded(count * 4)
        if count > numel or buffer.numel() != expected:
            raise PayloadError(f"{count} of {numel} elements in {buffer.numel()} bytes; expected {expected} bytes")
        wire.check_padding(buffer, count * dtype.itemsize, count * 4)
        start = wire.HEADER_BYTES + wire.padded(count * dtype.itemsize)
        values = buffer[wire.HEADER_BYTES :][: count * dtype.itemsize].clone().view(dtype)
        indices = buffer[start : start + 4 * count].clone().view(torch.int32)
        wire.check_range(indices, numel)
        return cls(indices=indices, values=values, numel=numel)

    def from_rows(self, rows: Tensor) -> Self:
        """Return the sum over ranks of buffers like this payload's: their elements one after the other."""
        wire.check_rows(rows, self._header())
        body = rows[:, wire.HEADER_BYTES :]
        start = numbers.nbytes(self.values, self.coded)
        indices = body[:, start : start + self.indices.nbytes].reshape(-1).view(torch.int32)
        wire.check_range(indices, self.numel)
        values = numbers.read(body, self.values, self.coded).view(-1)
        return replace(self, indices=indices, values=values, runs=self.runs * rows.shape[0], coded=None)

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
            coded=numbers.joined([part.coded for part in parts]),
        )

    def split(self) -> list[Self]:
        """Return one payload per span."""
        parts = zip(self.spans, self.indices.split(self.runs), self.values.split(self.runs), strict=True)
        return [
            replace(self, indices=index - offset, values=value, numel=length, spans=(), runs=(), coded=None)
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
            coded=None,
        )

    def _add(self, out: Tensor, sign: float) -> None:
        kernels.backend(out).scatter_add(out, self.indices, self.values, self.runs, sign)

    def _header(self) -> Tensor:
        return numbers.header(wire.SPARSE, self.values, self.coded, self.values.numel(), self.numel)


def _by_span(indices: Tensor, spans: Spans) -> tuple[Tensor, tuple[int, ...]]:
    """Return the order that groups indices by span, ascending in each, and how many fall in each."""
    in_order = bool((indices[1:] >= indices[:-1]).all())
    ascending, order = (indices, torch.arange(indices.numel(), device=indices.device)) if in_order else indices.sort()
    edges = torch.tensor([(offset, offset + length) for offset, length in spans], device=indices.device)
    bounds = torch.searchsorted(ascending, edges.to(indices.dtype)).tolist()
    return torch.cat([order[low:high] for low, high in bounds]), tuple(high - low for low, high in bounds)

"""Single elements by index."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Self, final

import torch
from torch import Tensor

from thinwire.errors import PayloadError
from thinwire.formats import Coded
from thinwire.payloads import indices, numbers, slots, spans, wire
from thinwire.payloads.base import Spans
from thinwire.payloads.elements import Elements
from thinwire.payloads.names import CODINGS, Names


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Sparse(Elements):
    """Values at int32 `indices`; elements of the spans that are not named are zero.

    `runs` are the lengths of stretches within which no index occurs twice, except as padding with value 0: one for each
    span, unless it is a sum of several payloads. How indices travel depends on their order, which is a property of
    where they come from, never of the data: `ascending` over all runs; in slot order, where `seeds` has a seed for each
    span (element p of a run of m lies in slot p of `kernels.slot_of` for m slots; an empty slot holds the span's last
    index with value 0); or any. `agreed` says that every rank holds these very indices, so that values alone need to
    travel. With `coded`, codes travel, and `values` are what they stand for.
    """

    indices: Tensor
    values: Tensor
    numel: int
    spans: Spans = field(default=())
    runs: tuple[int, ...] = field(default=())
    ascending: bool = True
    seeds: tuple[int, ...] = ()
    agreed: bool = False
    coded: Coded | None = None

    def __post_init__(self) -> None:
        if self.numel > indices.LARGEST_SPACE:
            raise PayloadError(f"{self.numel} elements; int32 indices reach 2³¹ - 1: use smaller buckets")
        if self.indices.shape != self.values.shape or self.indices.dtype != torch.int32:
            raise PayloadError(f"{self.values.numel()} values for {self.indices.numel()} {self.indices.dtype} indices")
        object.__setattr__(self, "spans", self.spans or ((0, self.numel),))
        object.__setattr__(self, "runs", self.runs or (self.values.numel(),))
        if self.seeds and not len(self.seeds) == len(self.spans) == len(self.runs):
            raise PayloadError(f"{len(self.seeds)} seeds for {len(self.spans)} spans and {len(self.runs)} runs")

    @property
    def nbytes(self) -> int:
        """Length of `to_buffer()` in bytes."""
        return wire.HEADER_BYTES + numbers.nbytes(self.values, self.coded) + self._names.nbytes

    def with_values(self, values: Tensor) -> Self:
        """Return the same indices with other values."""
        return replace(self, values=values, coded=None)

    def rekeyed(self, keys: Tensor, rows: Tensor) -> Self:
        """Return other elements of the same vector; those outside the spans are left out."""
        order, runs = spans.by_span(keys, self.spans)
        chosen, values = keys.index_select(0, order), rows.view(-1).index_select(0, order)
        return self._plain(chosen, values, runs, ascending=True)

    def filled(self, count: int) -> Self:
        """Return this with padding up to `count` elements: the last index of all spans, with value 0."""
        missing, last = count - self.values.numel(), spans.last_filled(self.spans)
        index = self.indices.new_full((missing,), max(0, sum(self.spans[last]) - 1))
        place = max(0, len(self.runs) - len(self.spans) + last)
        runs = (*self.runs[:place], self.runs[place] + missing, *self.runs[place + 1 :])
        values = torch.cat([self.values, self.values.new_zeros(missing)])
        return self._plain(torch.cat([self.indices, index]), values, runs, ascending=self._ascends)

    def named_nbytes(self, count: int) -> int:
        """Return how many bytes name `count` elements, ascending if the spans do."""
        if not spans.in_order(self.spans):
            return Names(wire.NUMBERS, self.spans, (count,), self.numel).nbytes
        return Names.ascending(self.spans, (count,), self.numel).nbytes

    def to_buffer(self) -> Tensor:
        """Return header, values and indices as uint8. Raises PayloadError where indices are not in their order."""
        if self._ascends and indices.is_cheap_to_check(self.indices):
            indices.check_ascending(self.indices, strictly=False)
        named = self._names.section(self.indices, self.seeds)
        return wire.pack(self._header(), *numbers.sections(self.values, self.coded), named)

    @classmethod
    def from_buffer(cls, buffer: Tensor) -> "Sparse":
        """Read what `to_buffer` wrote, as one span. Raises PayloadError when malformed, or of slots of several."""
        head = wire.parse(buffer, wire.SPARSE)
        dtype, body = numbers.check_plain(head), buffer[None, wire.HEADER_BYTES :]
        wire.check_coding(head.coding, CODINGS)
        if not head.count <= head.numel <= indices.LARGEST_SPACE:
            raise PayloadError(f"{head.count} of {head.numel} elements; expected at most all, of at most 2³¹ - 1")
        names = Names(head.coding, ((0, head.numel),), (head.count,), head.numel)
        size = wire.padded(head.count * dtype.itemsize)
        wire.check_length(buffer, wire.HEADER_BYTES + size + names.nbytes)
        return cls(
            indices=names.read(body[:, size:])[0],
            values=numbers.plain(body, head.count, dtype)[0],
            numel=head.numel,
            ascending=head.coding == wire.ELIAS_FANO,
            seeds=slots.seeds(body[0, size:], 1) if head.coding == wire.SLOTS else (),
        )

    def from_rows(self, rows: Tensor) -> Self:
        """Return the sum over ranks of buffers like this payload's: their elements one after the other."""
        wire.check_rows(rows, self._header(), self.nbytes)
        body = rows[:, wire.HEADER_BYTES :]
        found = self._names.read(body[:, numbers.nbytes(self.values, self.coded) :])
        if self._ascends and self._names.coding == wire.NUMBERS:
            indices.check_ascending(found, strictly=False)
        spans.check_inside(found, self.spans, self.numel, ascending=self._ascends)
        values = numbers.read(body, self.values, self.coded).view(-1)
        runs, ascending = self.runs * rows.shape[0], self._ascends and rows.shape[0] == 1
        return self._plain(found.view(-1), values, runs, ascending=ascending)

    @classmethod
    def assemble(cls, parts: Sequence[Self], offsets: Sequence[int], numel: int) -> Self:
        """Place vectors side by side."""
        return cls(
            indices=torch.cat([part.indices + offset for part, offset in zip(parts, offsets, strict=True)]),
            values=torch.cat([part.values for part in parts]),
            numel=numel,
            spans=tuple((offset, part.numel) for part, offset in zip(parts, offsets, strict=True)),
            runs=tuple(part.values.numel() for part in parts),
            ascending=all(part._ascends for part in parts),
            seeds=sum((part.seeds for part in parts), ()) if all(part.seeds for part in parts) else (),
            agreed=all(part.agreed for part in parts),
            coded=numbers.joined([part.coded for part in parts]),
        )

    def split(self) -> list[Self]:
        """Return one payload per span."""
        parts = zip(self.spans, self.indices.split(self.runs), self.values.split(self.runs), strict=True)
        seeds: list[tuple[int, ...]] = [(seed,) for seed in self.seeds] or [()] * len(self.spans)
        return [
            replace(self, indices=i - at, values=v, numel=n, spans=(), runs=(), seeds=seed, coded=None)
            for ((at, n), i, v), seed in zip(parts, seeds, strict=True)
        ]

    @classmethod
    def concat(cls, payloads: Sequence[Self]) -> Self:
        """Return the sum of payloads over the same space: the elements of all of them."""
        found, values = (torch.cat(list(part)) for part in zip(*((p.indices, p.values) for p in payloads), strict=True))
        runs = tuple(run for p in payloads for run in p.runs)
        return payloads[0]._plain(found, values, runs, ascending=len(payloads) == 1 and payloads[0]._ascends)

    @property
    def _ascends(self) -> bool:
        """Whether indices travel as ascending ones."""
        return self.ascending and not self.seeds and spans.in_order(self.spans)

    @property
    def _names(self) -> Names:
        if self.seeds:
            return Names.in_slots(self.spans, self.runs, self.numel)
        if self._ascends:
            return Names.ascending(self.spans, self.runs, self.numel)
        return Names(wire.NUMBERS, self.spans, self.runs, self.numel)

    def _plain(self, found: Tensor, values: Tensor, runs: tuple[int, ...], *, ascending: bool) -> Self:
        """Return other elements, in no slots, agreed by nobody, as plain values."""
        return replace(
            self, indices=found, values=values, runs=runs, ascending=ascending, seeds=(), agreed=False, coded=None
        )

    def _header(self) -> Tensor:
        count, coding = self.values.numel(), self._names.coding
        return numbers.header(wire.SPARSE, self.values, self.coded, count, self.numel, coding)

"""Single elements, addressed by index."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Self, final

import torch
from torch import Tensor
from typing_extensions import override

from thinwire import kernels
from thinwire.errors import PayloadError
from thinwire.formats import Coded
from thinwire.kernels import Checks
from thinwire.kernels.parts import Parts
from thinwire.payloads import numbers, slots, wire
from thinwire.payloads.base import Regions, Settling
from thinwire.payloads.indices import LARGEST_SPACE, Layout, in_order
from thinwire.payloads.keyed import Keyed

_Unread = tuple[Checks | None, Tensor | None]
_Scattered = tuple[Tensor, Regions, Tensor, Tensor, tuple[int, ...], bool, Checks | None, Tensor | None]
"""What `kernels.scatter` takes."""


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Sparse(Keyed, Settling):
    """Values at int32 `indices`; all other elements of the regions are zero.

    Args:
        indices: int32 (elements), into the whole vector.
        values: The values at these indices.
        numel: Elements of the whole vector.
        regions: (offset, length) of each part that it covers; by default one, the whole vector.
        runs: Lengths of stretches in which no index occurs twice, except as padding with value 0. A payload has one for
            each region; a sum of several payloads has more.
        ascending, seeds: The order of the indices, which decides how they travel. The codec fixes it, never the data.
            Indices ascend within each run, or are in slot order (with a seed for each region), or in any order. In slot
            order, element p of a run of m is in slot p of `kernels.slot_of` for m slots, and an empty slot holds the
            region's last index with value 0.
        agreed: Every rank has the same indices, so only values need to travel.
        coded: Codes travel, and `values` are the numbers they decode to.
        counted: How many values are not 0, 0-dim, if whoever made them knows.
        unread: Values and indices are (ranks, n), as they arrived; what is still to be checked, and room for flags.
    """

    indices: Tensor
    values: Tensor
    numel: int
    regions: Regions = field(default=())
    runs: tuple[int, ...] = field(default=())
    ascending: bool = True
    seeds: Sequence[int] = ()
    agreed: bool = False
    coded: Coded | None = None
    counted: Tensor | None = None
    unread: _Unread = (None, None)
    _unwritten: list[tuple[Self, Tensor]] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.numel > LARGEST_SPACE:
            raise PayloadError(f"{self.numel} elements; int32 indices reach 2³¹ - 1: use smaller buckets")
        if self.indices.shape != self.values.shape or self.indices.dtype != torch.int32:
            raise PayloadError(f"{self.values.numel()} values for {self.indices.numel()} {self.indices.dtype} indices")
        super().__post_init__()
        object.__setattr__(self, "runs", self.runs or (self.values.numel(),))
        if self.seeds and not len(self.seeds) == len(self.regions) == len(self.runs):
            raise PayloadError(f"{len(self.seeds)} seeds for {len(self.regions)} regions and {len(self.runs)} runs")

    @cached_property
    def layout(self) -> Layout:
        """Where the elements lie, in which order, and how their indices travel."""
        ascending = self.ascending and len(self.runs) == len(self.regions)
        return Layout.of(self.regions, self.runs, self.numel, ascending=ascending, slotted=bool(self.seeds))

    @property
    def summable(self) -> bool:
        """Whether all ranks agreed on the indices beforehand, and plain values travel."""
        return self.agreed and self.coded is None

    @cached_property
    def nbytes(self) -> int:
        """Length of `to_buffer()` in bytes."""
        return wire.HEADER_BYTES + numbers.nbytes(self.values, self.coded) + self.layout.nbytes

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
    def most_rows(self) -> int:
        """How many elements the regions have."""
        return sum(length for _, length in self.regions)

    def every_key(self) -> Tensor:
        """Return all indices within the regions."""
        device = self.values.device
        return torch.cat([torch.arange(o, o + n, dtype=torch.int32, device=device) for o, n in self.regions])

    def region_counts(self) -> list[int]:
        """Return how many elements lie in each run: in each region or, in a sum, in each region of each payload."""
        return list(self.runs)

    counts = region_counts  # a row is one value

    def carried(self) -> Tensor:
        """Return how many values are not 0; padding is 0."""
        return self.values.count_nonzero() if self.counted is None else self.counted

    @override
    def with_values(self, values: Tensor) -> Self:
        return replace(super().with_values(values), counted=None, unread=(None, None))

    def rekeyed(self, keys: Tensor, rows: Tensor) -> Self:
        """Return other elements of the same vector; those outside the regions are left out."""
        order, runs = self.layout.by_region(keys)
        chosen, values = keys.index_select(0, order), rows.view(-1).index_select(0, order)
        return self._plain(chosen, values, runs, ascending=True)

    def filled(self, count: int) -> Self:
        """Return this payload, padded to `count` elements with the last index of all regions and value 0."""
        missing = count - self.values.numel()
        index, runs = self.layout.padded(missing)
        found = torch.cat([self.indices, self.indices.new_full((missing,), index)])
        values = torch.cat([self.values, self.values.new_zeros(missing)])
        return self._plain(found, values, runs, ascending=self.layout.least == 0)

    def to_buffer(self) -> Tensor:
        """Return header, values and indices as uint8.

        Raises:
            PayloadError: If indices are not in their order.
        """
        named = self.layout.sections(self.indices, self.seeds)
        return wire.pack(self._header, *numbers.sections(self.values, self.coded), *named)

    @classmethod
    def from_buffer(cls, buffer: Tensor) -> "Sparse":
        """Read what `to_buffer` wrote, as one region.

        Raises:
            PayloadError: If it is malformed, or in slots of several regions.
        """
        head = wire.parse(buffer, wire.SPARSE, (wire.NUMBERS, wire.ELIAS_FANO, wire.SLOTS))
        dtype, body = numbers.check_plain(head), buffer[None, wire.HEADER_BYTES :]
        if not head.count <= head.numel <= LARGEST_SPACE:
            raise PayloadError(f"{head.count} of {head.numel} elements; expected count ≤ elements ≤ 2³¹ - 1")
        layout = Layout(((0, head.numel),), (head.count,), head.numel, head.coding)
        size = wire.padded(head.count * dtype.itemsize)
        wire.check_sections(buffer, wire.HEADER_BYTES, head.count * dtype.itemsize, layout.length)
        return cls(
            indices=layout.read(body[:, size:])[0],
            values=numbers.plain(body, head.count, dtype)[0],
            numel=head.numel,
            ascending=head.coding == wire.ELIAS_FANO,
            seeds=slots.seeds(body[0, size:], 1) if head.coding == wire.SLOTS else (),
        )

    def from_buffers(self, buffers: Tensor) -> Self:
        """Return the sum of the ranks' buffers, laid out like this payload's: one rank's elements after another's."""
        rows = numbers.Rows(buffers, self._header, self.values, self.coded, self.layout.length)
        found, (values, checks, flags) = self.layout.read(rows.named), rows.arrived()
        shape = (-1,) if checks is None else values.shape
        runs, ascending = self.runs * len(buffers), self.layout.least == 0
        return self._plain(found.view(shape), values.view(shape), runs, ascending=ascending, unread=(checks, flags))

    def write(self, out: Tensor) -> None:
        """Set the regions of `out` to zero and add the values."""
        kernels.scatter(*self._scattered(out))

    def _scattered(self, out: Tensor) -> _Scattered:
        ascending = self.ascending and in_order(self.regions)
        return out, self.regions, self.indices, self.values, self.runs, ascending, *self.unread

    def subtract_from(self, parts: Sequence[Tensor]) -> None:
        """Subtract the values of each region from its part."""
        self.take_from(parts, ())

    def take_from(self, parts: Sequence[Tensor], masked: Sequence[Tensor]) -> None:
        """Do so, and set the masked to zero where a value is not 0. A sum that waits for that is written with it."""
        own = self.indices, self.values, self.runs
        if self._unwritten:
            total, out = self._unwritten.pop()
            kernels.settle(*total._scattered(out), parts, self._offsets, *own, masked)
        else:
            kernels.scatter_add(parts, self._offsets, *own, -1.0, masked)

    def subtract_rounded(self, parts: Sequence[Tensor], seeds: Sequence[int]) -> None:
        """Subtract where values were sent; elsewhere nothing changes, so nothing is read."""
        if len(self.runs) > len(self.regions):  # an index may occur in several
            super().subtract_rounded(parts, seeds)
            return
        for x, (offset, found, values), seed in zip(parts, self._by_region, seeds, strict=True):
            kernels.subtract_rounded(x, found - offset if offset else found, values, seed)

    def mask(self, parts: Sequence[Tensor | None]) -> None:
        """Set each part to zero at every index of its region that carries a value other than 0."""
        there = parts if isinstance(parts, Parts) else [part for part in parts if part is not None]
        if len(there) == len(parts):
            kernels.scatter_add((), self._offsets, self.indices, self.values, self.runs, masked=there)
            return
        for part, (offset, found, values) in zip(parts, self._by_region, strict=True):
            if part is not None:
                kernels.scatter_add((), [offset], found, values, [found.numel()], masked=[part])

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
            regions=tuple((offset, part.numel) for part, offset in zip(parts, offsets, strict=True)),
            runs=tuple(part.values.numel() for part in parts),
            ascending=all(part.layout.least == 0 for part in parts),
            seeds=tuple(seed for part in parts for seed in part.seeds) if all(part.seeds for part in parts) else (),
            agreed=all(part.agreed for part in parts),
            coded=numbers.joined([part.coded for part in parts]),
        )

    @classmethod
    def concat(cls, payloads: Sequence[Self]) -> Self:
        """Return the sum of payloads over the same space: the elements of all of them."""
        found, values = (torch.cat(list(part)) for part in zip(*((p.indices, p.values) for p in payloads), strict=True))
        runs = tuple(run for p in payloads for run in p.runs)
        return payloads[0]._plain(found, values, runs, ascending=all(p.layout.least == 0 for p in payloads))

    @cached_property
    def _offsets(self) -> list[int]:
        return [offset for offset, _ in self.regions]

    @property
    def _by_region(self) -> Sequence[tuple[int, Tensor, Tensor]]:
        """Each region's offset, indices and values."""
        if self.regions == ((0, self.numel),):  # the whole vector: there may be several runs
            return [(0, self.indices, self.values)]
        return list(zip(self._offsets, self.indices.split(self.runs), self.values.split(self.runs), strict=True))

    def _plain(
        self, found: Tensor, values: Tensor, runs: tuple[int, ...], *, ascending: bool, unread: _Unread = (None, None)
    ) -> Self:
        """Return other elements as plain values: not in slots, and not agreed."""
        return type(self)(
            indices=found,
            values=values,
            numel=self.numel,
            regions=self.regions,
            runs=runs,
            ascending=ascending,
            unread=unread,
        )

    @cached_property
    def _header(self) -> bytes:
        count, coding = self.values.numel(), self.layout.coding
        return numbers.header(wire.SPARSE, self.values, self.coded, count, self.numel, coding)

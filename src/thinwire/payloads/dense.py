"""Payloads that carry every element of their regions."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import itemgetter
from typing import ClassVar, Self, final

import torch
from torch import Tensor
from typing_extensions import override

from thinwire import kernels
from thinwire.errors import PayloadError
from thinwire.formats import Coded
from thinwire.kernels import Arrived
from thinwire.kernels.parts import Parts, cut_at, whole
from thinwire.payloads import numbers, wire
from thinwire.payloads.base import Payload, Regions, Scratch


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Dense(Payload):
    """All values of the regions, in order.

    Args:
        values: Plain ones, or the numbers that codes decode to.
        numel: Elements of the whole vector, by default as many as there are values.
        regions: (offset, length) of each part that it covers; by default one, the whole vector.
        coded: The codes, if codes travel.
        unread: Where codes lie that are still to be checked, read and summed, and room for flags.
    """

    masks: ClassVar[bool] = False

    values: Tensor
    numel: int = -1
    regions: Regions = field(default=())
    coded: Coded | None = None
    unread: tuple[Arrived, Tensor] | None = None

    def __post_init__(self) -> None:
        if self.numel < 0:
            object.__setattr__(self, "numel", self.values.numel())
        super().__post_init__()
        if self.values.numel() != sum(self.counts()):
            raise PayloadError(f"{self.values.numel()} values for regions {self.regions}")

    @property
    def summable(self) -> bool:
        """Whether plain values travel: every rank sends the same elements, but codes cannot be added."""
        return self.coded is None

    @property
    @override
    def nbytes(self) -> int:
        return wire.HEADER_BYTES + numbers.nbytes(self.values, self.coded)

    @override
    def counts(self) -> list[int]:
        return list(map(itemgetter(1), self.regions))

    @property
    def scratch(self) -> Scratch:
        """Plain values are summed where they are; so are codes, but for their scales and where regions have gaps."""
        if self.coded is None:
            return Scratch()
        return Scratch(value=4, arriving=4 * self.coded.scales.numel() / max(1, self.coded.codes.numel()))

    @override
    def to_buffer(self) -> Tensor:
        return wire.pack(self._header, *numbers.sections(self.values, self.coded))

    @classmethod
    def from_buffer(cls, buffer: Tensor) -> "Dense":
        """Return what `to_buffer` wrote, as one region.

        Raises:
            PayloadError: If it is malformed.
        """
        head = wire.parse(buffer, wire.DENSE)
        dtype = numbers.check_plain(head)
        wire.check_sections(buffer, wire.HEADER_BYTES, head.count * dtype.itemsize)
        if head.count != head.numel:
            raise PayloadError(f"{head.count} of {head.numel} values; a dense payload has all")
        return cls(values=numbers.plain(buffer[None, wire.HEADER_BYTES :], head.count, dtype)[0])

    def of_each(self, buffers: Tensor) -> Tensor:
        """Return the values of each of several ranks, (ranks, count).

        Raises:
            PayloadError: As `from_buffers` does.
        """
        return self._rows(buffers).read()

    @override
    def from_buffers(self, buffers: Tensor) -> Self:
        rows = self._rows(buffers)
        lying = None if self.coded is None else rows.lying()
        if lying is None:
            return self.with_values(rows.read(summed=True))
        nothing = self.values.new_empty(()).expand(self.values.numel())  # codes are read where the sum is to be written
        return replace(self, values=nothing, coded=None, unread=lying)

    @override
    def write(self, out: Tensor) -> None:
        if self.unread is not None:
            arrived, flags = self.unread
            kernels.numbers_read(*arrived, True, Parts(out, cut_at(self.regions)), flags)
            return
        regions, values = whole(Parts(out, cut_at(self.regions))), self._values()
        values = values if len(values) == len(regions) else (self.values,)  # without gaps: all at once
        pairs = [pair for pair in zip(regions, values, strict=True) if not _begin_together(*pair)]
        if pairs:
            torch._foreach_copy_([region for region, _ in pairs], [part for _, part in pairs])

    @override
    def subtract_from(self, parts: Sequence[Tensor]) -> None:
        there = whole(parts)
        torch._foreach_sub_(there, [self.values] if len(there) == 1 else list(self._values()))

    @classmethod
    @override
    def assemble(cls, parts: Sequence[Self], offsets: Sequence[int], numel: int) -> Self:
        regions = tuple((offset, part.numel) for offset, part in zip(offsets, parts, strict=True))
        values = parts[0].values if len(parts) == 1 else torch.cat([part.values for part in parts])
        return cls(values=values, numel=numel, regions=regions, coded=numbers.joined([part.coded for part in parts]))

    def _rows(self, buffers: Tensor) -> numbers.Rows:
        return numbers.Rows(buffers, self._header, self.values, self.coded)

    def _values(self) -> tuple[Tensor, ...]:
        return self.values.split(self.counts())

    @cached_property
    def _header(self) -> bytes:
        count = self.values.numel()
        return numbers.header(wire.DENSE, self.values, self.coded, count, count)


def _begin_together(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors begin at the same place in memory. Fake tensors can tell, and have no address."""
    return x.storage_offset() == y.storage_offset() and x.untyped_storage()._cdata == y.untyped_storage()._cdata

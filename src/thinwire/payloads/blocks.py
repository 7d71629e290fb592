"""Whole blocks of adjacent elements, addressed by number."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import ClassVar, Self, final

import torch
from torch import Tensor
from typing_extensions import override

from thinwire.errors import PayloadError
from thinwire.formats import Coded
from thinwire.kernels.memory import constant
from thinwire.payloads import numbers, wire
from thinwire.payloads.base import Regions
from thinwire.payloads.indices import CODINGS, LARGEST_SPACE, Layout
from thinwire.payloads.keyed import Keyed
from thinwire.payloads.sparse import Sparse

_SHAPE = struct.Struct("<II")
_HEAD = wire.HEADER_BYTES + _SHAPE.size


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Blocks(Keyed):
    """Holds values[i·width : (i+1)·width] of block `keys[i]`; all other blocks are zero.

    Each region is divided into blocks of `width` elements, the last one padded with zeros. Blocks are numbered
    consecutively across regions. Keys travel in whichever coding is shortest.

    Args:
        keys: int32 (blocks).
        values: (blocks · width).
        numel: Elements of the whole vector.
        width: Elements of a block.
        regions: (offset, length) of each part that it covers; by default one, the whole vector.
        runs: Lengths; within each run, keys ascend without repeats. A payload can travel only if it has one run.
        coded: If codes travel, what `values` were decoded from.
        held: How many blocks lie in each region, where that is known without looking at the keys.
    """

    keys: Tensor
    values: Tensor
    numel: int
    width: int
    regions: Regions = field(default=())
    runs: tuple[int, ...] = field(default=())
    coded: Coded | None = None
    held: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.keys.dtype != torch.int32 or self.values.numel() != self.keys.numel() * self.width:
            raise PayloadError(f"{self.values.numel()} values for {self.keys.numel()} blocks of {self.width}")
        super().__post_init__()
        object.__setattr__(self, "runs", self.runs or (self.keys.numel(),))

    summable: ClassVar[bool] = False  # never: which blocks travel differs by rank

    @property
    def rows(self) -> Tensor:
        """The blocks, of shape (blocks, width)."""
        return self.values.view(-1, self.width)

    @property
    @override
    def key_space(self) -> int:
        return self._edges[-1]

    def region_counts(self) -> list[int]:
        """Return how many blocks lie in each region; keys must ascend."""
        if self.held:
            return list(self.held)
        edges = constant(self._edges, torch.int32, self.keys.device)
        return torch.searchsorted(self.keys, edges).diff().tolist()

    @override
    def carried(self) -> int:
        return self.values.numel()

    @property
    @override
    def nbytes(self) -> int:
        return _HEAD + numbers.nbytes(self.values, self.coded) + self.layout.nbytes

    @override
    def rekeyed(self, keys: Tensor, rows: Tensor) -> Self:
        return replace(self, keys=keys, values=rows.reshape(-1), runs=(keys.numel(),), coded=None, held=())

    def filled(self, count: int) -> Self:
        """Return this as it is.

        Raises:
            PayloadError: Unless it has `count` blocks: a bitmap cannot be padded.
        """
        if self.keys.numel() != count:
            raise PayloadError(f"{self.keys.numel()} blocks; expected {count}, as blocks cannot be padded")
        return self

    def to_buffer(self) -> Tensor:
        """Return header, shape, values and keys as uint8.

        Raises:
            PayloadError: Unless keys ascend.
        """
        named = self.layout.sections(self.keys)
        return wire.pack(self._head(), *numbers.sections(self.values, self.coded), *named)

    @classmethod
    def from_buffer(cls, buffer: Tensor) -> "Blocks":
        """Read what `to_buffer` wrote, as one region of whole blocks.

        Raises:
            PayloadError: If it is malformed.
        """
        head = wire.parse(buffer, wire.BLOCKS, CODINGS)
        dtype, body = numbers.check_plain(head), buffer[None, _HEAD:]
        if buffer.numel() < _HEAD:
            raise PayloadError(f"a block payload has at least {_HEAD} bytes; got {buffer.numel()}")
        width, space = _SHAPE.unpack(bytes(buffer[wire.HEADER_BYTES : _HEAD].tolist()))
        if not head.count <= space <= LARGEST_SPACE or not width:
            raise PayloadError(
                f"{head.count} of {space} blocks of {width}; expected count ≤ blocks ≤ 2³¹ - 1, width > 0"
            )
        size, layout = head.count * width * dtype.itemsize, Layout.of_rows(head.count, space, head.coding)
        wire.check_sections(buffer, _HEAD, size, layout.length)
        keys = layout.read(body[:, wire.padded(size) :])[0]
        values = numbers.plain(body, head.count * width, dtype)[0]
        return cls(keys=keys, values=values, numel=space * width, width=width)

    def from_buffers(self, buffers: Tensor) -> Self:
        """Return the sum of the ranks' buffers, laid out like this payload's: one rank's blocks after another's."""
        rows = numbers.Rows(buffers, self._head(), self.values, self.coded, self.layout.length)
        keys, values = self.layout.read(rows.named).view(-1), rows.read().view(-1)
        return replace(self, keys=keys, values=values, runs=self.runs * buffers.shape[0], coded=None, held=())

    @cached_property
    def elements(self) -> Sparse:
        """Return the same vector element by element."""
        places, inside = self._places()
        runs, values = tuple(run * self.width for run in self.runs), torch.where(inside, self.values, 0)
        ascending = len(self.runs) == 1
        return Sparse(
            indices=places, values=values, numel=self.numel, regions=self.regions, runs=runs, ascending=ascending
        )

    @override
    def write(self, out: Tensor) -> None:
        self.elements.write(out)

    @override
    def subtract_from(self, parts: Sequence[Tensor]) -> None:
        self._elements_by_region.subtract_from(parts)

    @override
    def subtract_rounded(self, parts: Sequence[Tensor], seeds: Sequence[int]) -> None:
        self._elements_by_region.subtract_rounded(parts, seeds)

    @override
    def mask(self, parts: Sequence[Tensor | None]) -> None:
        self._elements_by_region.mask(parts)

    @override
    def is_finite(self, out: Tensor) -> bool:
        return self.elements.is_finite(out)

    @classmethod
    @override
    def assemble(cls, parts: Sequence[Self], offsets: Sequence[int], numel: int) -> Self:
        starts = accumulate((part.key_space for part in parts[:-1]), initial=0)
        return cls(
            keys=torch.cat([part.keys + start for part, start in zip(parts, starts, strict=True)]),
            values=torch.cat([part.values for part in parts]),
            numel=numel,
            width=parts[0].width,
            regions=tuple((offset, part.numel) for offset, part in zip(offsets, parts, strict=True)),
            coded=numbers.joined([part.coded for part in parts]),
            held=tuple(part.keys.numel() for part in parts),
        )

    @cached_property
    def _edges(self) -> tuple[int, ...]:
        """The number of each region's first block, then how many blocks there are in all."""
        return tuple(accumulate((-(-length // self.width) for _, length in self.regions), initial=0))

    @cached_property
    def _elements_by_region(self) -> Sparse:
        elements = self.elements
        return elements if len(self.regions) == 1 else replace(elements, runs=tuple(self.counts()))

    def _places(self) -> tuple[Tensor, Tensor]:
        """Return the indices (int32) of blocks' elements, and which are no padding, which has the region's last."""
        device = self.keys.device
        columns = (self._edges, *zip(*self.regions, strict=True))
        starts, offsets, lengths = (constant(x, torch.int32, device) for x in columns)
        region = torch.searchsorted(starts, self.keys, right=True) - 1
        first = (self.keys - starts[region]) * self.width
        within = first[:, None] + torch.arange(self.width, device=device, dtype=torch.int32)
        last = lengths[region, None] - 1
        return (within.minimum(last) + offsets[region, None]).view(-1), (within <= last).view(-1)

    @property
    def layout(self) -> Layout:
        """How the keys travel."""
        return Layout.of_rows(self.keys.numel(), self.key_space)

    def _head(self) -> bytes:
        head = numbers.header(wire.BLOCKS, self.values, self.coded, self.keys.numel(), self.numel, self.layout.coding)
        return head + _SHAPE.pack(self.width, self.key_space)

"""Whole blocks of adjacent elements by number."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Self, final

import torch
from torch import Tensor

from thinwire.errors import PayloadError
from thinwire.formats import Coded
from thinwire.payloads import numbers, which, wire
from thinwire.payloads.base import Spans
from thinwire.payloads.keyed import Keyed
from thinwire.payloads.sparse import Sparse

_SHAPE = struct.Struct("<II")


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Blocks(Keyed):
    """Block `keys[i]` (int32) holds values[i·width : (i+1)·width]; blocks that are not named are zero.

    Every span is cut into blocks of `width` elements, the last one filled up with zeros, and the blocks of all spans
    are numbered on. On the wire a bitmap or int32 numbers tell which blocks follow, whichever is shorter. `runs` are
    the lengths of stretches within which keys ascend.
    """

    keys: Tensor
    values: Tensor
    numel: int
    width: int
    spans: Spans = field(default=())
    runs: tuple[int, ...] = field(default=())
    coded: Coded | None = None

    def __post_init__(self) -> None:
        if self.keys.dtype != torch.int32 or self.values.numel() != self.keys.numel() * self.width:
            raise PayloadError(f"{self.values.numel()} values for {self.keys.numel()} blocks of {self.width}")
        object.__setattr__(self, "spans", self.spans or ((0, self.numel),))
        object.__setattr__(self, "runs", self.runs or (self.keys.numel(),))

    @property
    def summable(self) -> bool:
        """Never: which blocks travel differs by rank."""
        return False

    @property
    def rows(self) -> Tensor:
        """The blocks, of shape (blocks, width)."""
        return self.values.view(-1, self.width)

    @property
    def key_space(self) -> int:
        """How many blocks there are."""
        return self._edges[-1]

    @property
    def nbytes(self) -> int:
        """Length of `to_buffer()` in bytes."""
        named = which.nbytes(self.keys.numel(), self.key_space)
        return wire.HEADER_BYTES + _SHAPE.size + numbers.nbytes(self.values, self.coded) + named

    def with_values(self, values: Tensor) -> Self:
        """Return the same blocks with other values."""
        return replace(self, values=values, coded=None)

    @property
    def most_rows(self) -> int:
        """How many blocks there are."""
        return self.key_space

    def every_key(self) -> Tensor:
        """Return the numbers of all blocks."""
        return torch.arange(self.key_space, dtype=torch.int32, device=self.keys.device)

    def span_counts(self) -> list[int]:
        """Return how many blocks lie in each span; keys must ascend."""
        edges = torch.tensor(self._edges, dtype=torch.int32, device=self.keys.device)
        return torch.searchsorted(self.keys, edges).diff().tolist()

    def rekeyed(self, keys: Tensor, rows: Tensor) -> Self:
        """Return other blocks of the same vector."""
        return replace(self, keys=keys, values=rows.reshape(-1), runs=(keys.numel(),), coded=None)

    def filled(self, count: int) -> Self:
        """Return this as it is. Raises PayloadError if it has other than `count` blocks: a bitmap takes no padding."""
        if self.keys.numel() != count:
            raise PayloadError(f"{self.keys.numel()} blocks; expected {count}, as blocks cannot be padded")
        return self

    def to_buffer(self) -> Tensor:
        """Return header, shape, values, and bitmap or numbers of the blocks, as uint8."""
        values = numbers.sections(self.values, self.coded)
        return wire.pack(self._head(), self._shape(), *values, which.section(self.keys, self.key_space))

    @classmethod
    def from_buffer(cls, buffer: Tensor) -> "Blocks":
        """Read what `to_buffer` wrote, as one span of whole blocks. Raises PayloadError when malformed."""
        found, count, _ = wire.parse(buffer, wire.BLOCKS)
        dtype = numbers.check_plain(found)
        start = wire.HEADER_BYTES + _SHAPE.size
        if buffer.numel() < start:
            raise PayloadError(f"a block payload has at least {start} bytes; got {buffer.numel()}")
        width, space = _SHAPE.unpack(bytes(buffer[wire.HEADER_BYTES : start].tolist()))
        size = count * width * dtype.itemsize
        end = start + wire.padded(size)
        if count > space or buffer.numel() != end + which.nbytes(count, space):
            raise PayloadError(f"{count} of {space} blocks of {width} in {buffer.numel()} bytes")
        values = buffer[start : start + size].clone().view(dtype)
        keys = which.read(buffer[None, end:], count, space)
        return cls(keys=keys, values=values, numel=space * width, width=width)

    def from_rows(self, rows: Tensor) -> Self:
        """Return the sum over ranks of buffers like this payload's: their blocks one after the other."""
        head = torch.cat([self._head(), self._shape()])
        wire.check_rows(rows, head)
        body = rows[:, head.numel() :]
        start = numbers.nbytes(self.values, self.coded)
        keys = which.read(body[:, start:], self.keys.numel(), self.key_space)
        values = numbers.read(body, self.values, self.coded).view(-1)
        return replace(self, keys=keys, values=values, runs=self.runs * rows.shape[0], coded=None)

    def elements(self) -> Sparse:
        """Return the same vector element by element."""
        edges = torch.tensor(self._edges, device=self.keys.device, dtype=torch.int32)
        spans = torch.tensor(self.spans, device=self.keys.device, dtype=torch.int32)
        part = torch.searchsorted(edges, self.keys, right=True) - 1
        starts = (self.keys - edges[part]) * self.width
        within = starts[:, None] + torch.arange(self.width, device=self.keys.device, dtype=torch.int32)
        inside = within < spans[part, 1, None]
        # What fills up a last block is sent to index 0 with value 0: padding, in a sparse payload.
        indices = torch.where(inside, within + spans[part, 0, None], 0).view(-1)
        values = torch.where(inside.view(-1), self.values, 0)
        runs = tuple(run * self.width for run in self.runs)
        return Sparse(indices=indices, values=values, numel=self.numel, spans=self.spans, runs=runs)

    def write(self, out: Tensor) -> None:
        """Set the spans of `out` to zero and add the blocks."""
        self.elements().write(out)

    def subtract_from(self, x: Tensor) -> None:
        """Subtract the blocks from `x`."""
        self.elements().subtract_from(x)

    def mask(self, x: Tensor) -> None:
        """Set `x` to zero at every element sent that is not 0."""
        self.elements().mask(x)

    def is_finite(self, out: Tensor) -> bool:
        """Whether `out` is finite in every block."""
        return self.elements().is_finite(out)

    @classmethod
    def assemble(cls, parts: Sequence[Self], offsets: Sequence[int], numel: int) -> Self:
        """Place vectors side by side."""
        starts = accumulate((part.key_space for part in parts[:-1]), initial=0)
        return cls(
            keys=torch.cat([part.keys + start for part, start in zip(parts, starts, strict=True)]),
            values=torch.cat([part.values for part in parts]),
            numel=numel,
            width=parts[0].width,
            spans=tuple((offset, part.numel) for offset, part in zip(offsets, parts, strict=True)),
            coded=numbers.joined([part.coded for part in parts]),
        )

    def split(self) -> list[Self]:
        """Return one payload per span."""
        counts = self.span_counts()
        parts = zip(self.spans, self._edges, self.keys.split(counts), self.rows.split(counts), strict=False)
        return [
            replace(self, keys=keys - edge, values=rows.reshape(-1), numel=length, spans=(), runs=(), coded=None)
            for (_, length), edge, keys, rows in parts
        ]

    @classmethod
    def concat(cls, payloads: Sequence[Self]) -> Self:
        """Return the sum of payloads over the same space: the blocks of all of them."""
        return replace(
            payloads[0],
            keys=torch.cat([p.keys for p in payloads]),
            values=torch.cat([p.values for p in payloads]),
            runs=tuple(run for p in payloads for run in p.runs),
            coded=None,
        )

    @cached_property
    def _edges(self) -> tuple[int, ...]:
        """The number of the first block of each span, and of all blocks."""
        return tuple(accumulate((-(-length // self.width) for _, length in self.spans), initial=0))

    def _head(self) -> Tensor:
        return numbers.header(wire.BLOCKS, self.values, self.coded, self.keys.numel(), self.numel)

    def _shape(self) -> Tensor:
        packed = bytearray(_SHAPE.pack(self.width, self.key_space))
        return torch.frombuffer(packed, dtype=torch.uint8).to(self.keys.device)

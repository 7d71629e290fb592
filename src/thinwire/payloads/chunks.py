"""The largest coefficients of each chunk of a tensor. Ranks' coefficients are summed and transformed back once."""

import struct
import zlib
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field, replace
from functools import cached_property, lru_cache, partial
from itertools import groupby
from typing import ClassVar, NamedTuple, Self, final

import torch
from torch import Tensor
from typing_extensions import override

from thinwire import kernels
from thinwire.errors import PayloadError
from thinwire.formats import Coded
from thinwire.kernels import Arrived, Chunking, Numbered, Numbering
from thinwire.kernels.parts import Parts, are_of, cut_at
from thinwire.payloads import numbers, wire
from thinwire.payloads.base import Regions, Scratch, Settling, real
from thinwire.payloads.indices import Layout, checked
from thinwire.waits import on_host, refuse_if

_LAYOUT = struct.Struct("<II")
_TRANSFORMS = {None: 0, "dct": 1, "hadamard": 2}


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Chunks(Settling):
    """Some coefficients of each chunk.

    Args:
        positions: int16, where in its chunk each coefficient belongs; they ascend in each chunk.
        values: The coefficients: one region after another, and in a sum one rank after another.
        numel: Elements of the whole vector.
        chunkings: How each region is cut into chunks. Every rank knows it beforehand, so it does not travel.
        regions: (offset, length) of each part that it covers; by default one, the whole vector.
        coded: If codes travel, what `values` were decoded from.
        unread: Where the values lie that are still to be checked and read, and room for flags.
    """

    positions: Tensor
    values: Tensor
    numel: int
    chunkings: tuple[Chunking, ...]
    regions: Regions = field(default=())
    coded: Coded | None = None
    unread: tuple[Arrived, Tensor] | None = None
    _unwritten: list[tuple[Self, Tensor]] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        cut, lengths = [c.numel for c in self.chunkings], [length for _, length in self.regions]
        if cut != lengths:
            raise PayloadError(f"chunks of tensors of {cut} elements; expected the regions' {lengths}")
        found, count = (self.positions.dtype, self.positions.numel(), self.values.numel()), self._cut.carried
        if found[0] != torch.int16 or found[1] != found[2] or (found[1] % count if count else found[1]):
            raise PayloadError(f"{found[2]} values at {found[1]} {found[0]} positions; expected {count} for each rank")

    transformed: ClassVar[bool] = True
    summable: ClassVar[bool] = False  # never: which coefficients travel differs by rank

    @property
    @override
    def nbytes(self) -> int:
        named = wire.padded(self._cut.named_nbytes)
        return wire.HEADER_BYTES + _LAYOUT.size + numbers.nbytes(self.values, self.coded) + named

    @override
    def counts(self) -> list[int]:
        ranks = self._ranks
        return [chunking.count * ranks for chunking in self.chunkings]

    def to_buffer(self) -> Tensor:
        """Return header, layout, values and positions as uint8.

        Raises:
            PayloadError: For a sum of several ranks.
        """
        if self._ranks > 1:
            raise PayloadError(f"a sum of {self._ranks} payloads of chunks cannot be sent; only one rank's payload can")
        if self._cut.numbered:
            named = kernels.subsets_encode(self.positions, self._cut.numbered)
        else:
            parts = self.positions.split([regions * chunking.count for chunking, regions in self._cut.runs])
            named = torch.cat([_sections(part, *run) for part, run in zip(parts, self._cut.runs, strict=True)])
        return wire.pack(self._head, *numbers.sections(self.values, self.coded), named)

    def from_buffers(self, buffers: Tensor) -> Self:
        """Return the sum of the ranks' buffers, laid out like this payload's: one rank after another."""
        rows = numbers.Rows(buffers, self._head, self.values, self.coded, self._cut.named_nbytes)
        named, here = rows.named[:, : self._cut.named_nbytes], on_host(buffers)
        if self._cut.numbered and not here:
            flat, wrong = kernels.subsets_read(named, self._cut.numbered)
            refuse_if(wrong, partial(_malformed, *self.chunkings))
        else:
            sizes = [regions * _named(chunking).nbytes for chunking, regions in self._cut.runs]
            parts = zip(named.split(sizes, 1), self._cut.runs, strict=True)
            positions = _checked([(_read(part, *run), run[0]) for part, run in parts])
            each = [part.to(torch.int16).flatten(1) for part in positions]
            flat = each[0] if len(each) == 1 else torch.cat(each, dim=1)
        lying = None if here else rows.lying()
        values = rows.read().view(-1) if lying is None else self.values.new_empty(flat.numel())
        return replace(self, positions=flat.view(-1), values=values, coded=None, unread=lying)

    # positions and values, packed and unpacked
    scratch: ClassVar[Scratch] = Scratch(element=0.05, value=14, arriving=16)

    @override
    def write(self, out: Tensor) -> None:
        self._put(Parts(out, cut_at(self.regions)), subtract=False)

    @override
    def subtract_from(self, parts: Sequence[Tensor]) -> None:
        total, out = self._unwritten[0] if self._unwritten else (self, None)
        if out is None or total.unread is None:
            self._put(parts, subtract=True)
            return
        self._unwritten.clear()
        outs, positions = Parts(out, cut_at(self.regions)), total.positions.view(total._ranks, -1)
        kernels.chunk_settle(outs, positions, *total.unread, parts, *self._rows, self.chunkings)

    def mask(self, parts: Sequence[Tensor | None]) -> None:
        """Set each part to zero where an element was sent that is not 0. With a transform, do nothing."""
        for part, (positions, values, chunking) in zip(parts, self._by_region, strict=True):
            if part is not None and chunking.transform is None:
                sent = values.new_empty(chunking.numel)
                kernels.chunk_put([sent], positions, values, [chunking], subtract=False)
                part.masked_fill_(sent != 0, 0)

    @classmethod
    @override
    def assemble(cls, parts: Sequence[Self], offsets: Sequence[int], numel: int) -> Self:
        return cls(
            positions=torch.cat([part.positions for part in parts]),
            values=torch.cat([part.values for part in parts]),
            numel=numel,
            chunkings=tuple(chunking for part in parts for chunking in part.chunkings),
            regions=tuple((offset, part.numel) for offset, part in zip(offsets, parts, strict=True)),
            coded=numbers.joined([part.coded for part in parts]),
        )

    @cached_property
    def _cut(self) -> "_Cut":
        return _cut(self.chunkings)

    @property
    def _ranks(self) -> int:
        return self.values.numel() // max(1, self._cut.carried) or 1

    @cached_property
    def _by_region(self) -> Sequence[tuple[Tensor, Tensor, Chunking]]:
        """Each region's positions and values, a row for each rank, the values in float32 or wider."""
        columns = [x.split([c.count for c in self.chunkings], 1) for x in self._rows]
        parts = zip(*columns, self.chunkings, strict=True)
        return [(positions.contiguous(), values.contiguous(), chunking) for positions, values, chunking in parts]

    @property
    def _rows(self) -> tuple[Tensor, Tensor]:
        """Positions, and values in float32 or wider: a row for each rank."""
        if self.unread is not None:
            arrived, flags = self.unread
            kernels.numbers_read(*arrived, False, self.values.view(self._ranks, -1), flags)
        values = self.values.to(real(self.values.dtype))
        return self.positions.view(self._ranks, -1), values.view(self._ranks, -1)

    def _put(self, outs: Sequence[Tensor], *, subtract: bool) -> None:
        """Write or subtract each region: those of another dtype one by one."""
        if not on_host(self.values) or are_of(outs, real(self.values.dtype)):
            kernels.chunk_put(outs, *self._rows, self.chunkings, subtract)
            return
        for out, (positions, values, chunking) in zip(outs, self._by_region, strict=True):
            wide = out.to(values.dtype)
            kernels.chunk_put([wide], positions, values, [chunking], subtract)
            out.copy_(wide)

    @cached_property
    def _head(self) -> bytes:
        return numbers.header(wire.CHUNKS, self.values, self.coded, self.values.numel(), self.numel) + self._cut.packed


class _Cut(NamedTuple):
    """What follows from how regions are cut: coefficients of a rank, positions' bytes, runs cut alike, the layout.

    `numbered` are the runs if all positions are numbered alone; otherwise there are none.
    """

    carried: int
    named_nbytes: int
    runs: Sequence[tuple[Chunking, int]]
    numbered: tuple[Numbered, ...]
    packed: bytes


@lru_cache(maxsize=1024)  # they stay the same from step to step
def _cut(chunkings: tuple[Chunking, ...]) -> _Cut:
    cut = [number for c in chunkings for number in (*astuple(c)[:-1], _TRANSFORMS[c.transform])]
    runs = [(chunking, len(list(alike))) for chunking, alike in groupby(chunkings)]
    numbered = [(_named(chunking).numbering, regions, chunking.chunks) for chunking, regions in runs]
    alone = [Numbered(each, *sizes) for each, *sizes in numbered if each and not each.low_bits]
    return _Cut(
        carried=sum(chunking.count for chunking in chunkings),
        named_nbytes=sum(_named(chunking).nbytes for chunking in chunkings),
        runs=runs,
        numbered=tuple(alone) if len(alone) == len(runs) else (),
        packed=_LAYOUT.pack(len(chunkings), zlib.crc32(struct.pack(f"<{len(cut)}Q", *cut))),
    )


class _Named(NamedTuple):
    """How a region's positions are named: those of each chunk numbered or, if that is shorter, all of them in a row."""

    numbering: Numbering | None
    in_a_row: Layout
    nbytes: int


@lru_cache(maxsize=1024)
def _named(chunking: Chunking) -> _Named:
    in_a_row = Layout.of_rows(chunking.count, chunking.chunks * chunking.size)
    if numbering := Numbering.of(chunking.size, chunking.kept):
        numbered = -(-chunking.chunks * numbering.bits // 8) + -(-chunking.count * numbering.low_bits // 8)
        if numbered <= in_a_row.nbytes:
            return _Named(numbering, in_a_row, numbered)
    return _Named(None, in_a_row, in_a_row.nbytes)


def _sections(positions: Tensor, chunking: Chunking, regions: int) -> Tensor:
    """Return the bytes that name the positions of several regions that are cut alike. Each region's are whole bytes."""
    rows, numbering = positions.view(regions, -1), _named(chunking).numbering
    if numbering is None:
        return torch.cat([_section(row, chunking) for row in rows])
    run = (Numbered(numbering, regions, chunking.chunks),)
    if not (low := numbering.low_bits):
        return kernels.subsets_encode(positions, run)
    highs = (positions.view(-1, numbering.kept) >> low) + _ranks(numbering, positions)
    lows = [kernels.pack_bits(row & ((1 << low) - 1), low) for row in rows]
    whole = kernels.subsets_encode(highs.view(-1), run).view(regions, -1)
    return torch.cat([whole, torch.stack(lows)], dim=1).view(-1)


def _section(positions: Tensor, chunking: Chunking) -> Tensor:
    """Return the bytes that name a region's positions, those of all its chunks in a row."""
    named, keys = _named(chunking), (positions.view(-1, chunking.kept) + _firsts(chunking, positions)).view(-1)
    coded = wire.written(*named.in_a_row.sections(keys)).view(torch.uint8)
    return torch.nn.functional.pad(coded, (0, named.nbytes - coded.numel()))


def _read(rows: Tensor, chunking: Chunking, regions: int) -> Tensor:
    """Return every rank's positions in regions that are cut alike, (ranks, chunks of all, kept), not checked yet."""
    ranks, rows = len(rows), rows.reshape(len(rows) * regions, -1)
    if (named := _named(chunking)).numbering is not None:
        found = _read_numbered(rows, chunking, named.numbering)
    else:
        if named.in_a_row.coding == wire.NUMBERS:
            refuse_if(rows[:, 4 * chunking.count :].any(), partial(_malformed, chunking))
        keys = named.in_a_row.decoded(rows.contiguous())
        found = keys.view(len(rows), chunking.chunks, chunking.kept) - _firsts(chunking, keys)
    return found.reshape(ranks, regions * chunking.chunks, chunking.kept)


def _checked(found: Sequence[tuple[Tensor, Chunking]]) -> Sequence[Tensor]:
    """Return positions, moved to where they ascend within each chunk if that is only noted; PayloadError otherwise."""
    alike = [list(some) for _, some in groupby(found, lambda pair: (pair[1].size, pair[1].kept))]
    positions = [torch.cat([part for part, _ in some], 1) if len(some) > 1 else some[0][0] for some in alike]
    chunkings = [some[0][1] for some in alike]
    return [
        checked(part.flatten(0, 1), (0, cut.size), 1, partial(_malformed, cut)).view_as(part)
        for part, cut in zip(positions, chunkings, strict=True)
    ]


def _malformed(*chunkings: Chunking) -> PayloadError:
    sizes = " or ".join(dict.fromkeys(f"{cut.kept} positions of each chunk of {cut.size}" for cut in chunkings))
    return PayloadError(f"{sizes} coefficients are malformed")


def _read_numbered(rows: Tensor, chunking: Chunking, numbering: Numbering) -> Tensor:
    """Return positions (ranks, chunks, kept), of which one is negative if a row is malformed."""
    low, cut = numbering.low_bits, -(-chunking.chunks * numbering.bits // 8)
    found = kernels.subsets_decode(rows[:, :cut].contiguous(), chunking.chunks, numbering)
    found = found.view(rows.shape[0], chunking.chunks, chunking.kept)
    if not low:
        return found
    lows = [kernels.unpack_bits(row[cut:].contiguous(), chunking.count, low, torch.int16) for row in rows]
    spare = chunking.count * low % 8
    padded = (rows[:, -1] >> spare != 0) & (spare > 0)
    highs = torch.where(padded[:, None, None], -1, found - _ranks(numbering, found))
    return (highs << low) | torch.stack(lows).view_as(found)


def _ranks(numbering: Numbering, like: Tensor) -> Tensor:
    return torch.arange(numbering.kept, dtype=torch.int16, device=like.device)


def _firsts(chunking: Chunking, like: Tensor) -> Tensor:
    """Return where each chunk begins if all of their coefficients stand in a row, int32 (chunks, 1)."""
    return torch.arange(chunking.chunks, dtype=torch.int32, device=like.device)[:, None] * chunking.size

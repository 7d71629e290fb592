"""Indices in slot order: a slot's number carries part of the index, and the quotient is the rest."""

import struct
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.errors import PayloadError
from thinwire.kernels.memory import sent
from thinwire.payloads import wire
from thinwire.payloads.base import Regions
from thinwire.payloads.indices import is_cheap_to_check
from thinwire.waits import known, on_host, refuse_if

_COUNT_BYTES = 8
_SEED = struct.Struct("<Q")
_LARGEST_SEED = 2**64 - 1


class _Part(NamedTuple):
    """The slots of one region: where the region lies and how many there are."""

    offset: int
    length: int
    slots: int

    @property
    def empty(self) -> int:
        """The code of an empty slot: the one after all quotients."""
        return -(-self.length // self.slots)

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return self.empty.bit_length()

    @property
    def nbytes(self) -> int:
        """Bytes of all codes."""
        return -(-self.slots * self.bits // 8)


def nbytes(regions: Regions, runs: Sequence[int]) -> int:
    """Return the length of the section, padding included."""
    return wire.padded(_length(regions, runs))


def section(indices: Tensor, regions: Regions, runs: Sequence[int], seeds: Sequence[int]) -> Tensor:
    """Return, as uint8, the number of regions, the seed of each, and the packed codes of each.

    Raises PayloadError unless each index (int32) is in the slot that its region's seed assigns to it, or is its
    region's last index.
    """
    head = struct.pack(f"<Q{len(seeds)}Q", len(seeds), *(seed & _LARGEST_SEED for seed in seeds))
    packed = [sent(torch.frombuffer(bytearray(head), dtype=torch.uint8), indices.device)]
    for part, index, seed in zip(_parts(regions, runs), indices.split(list(runs)), seeds, strict=True):
        if part.slots:
            codes = _codes(index, part, seed)
            packed.append(kernels.pack_bits(codes, part.bits))
    return torch.cat(packed)


def read(buffers: Tensor, regions: Regions, runs: Sequence[int]) -> Tensor:
    """Read the indices, int32 (ranks, count), from the ranks' sections. Raises PayloadError when malformed."""
    wire.check_padding(buffers, _length(regions, runs))
    if not on_host(buffers):
        return _on_device(buffers, regions, runs)
    return torch.stack([torch.cat([*_indices(buffer, regions, runs)]) for buffer in buffers])


def seeds(buffer: Tensor, count: int) -> tuple[int, ...]:
    """Return the seeds of `count` regions from a section. Raises PayloadError if the section has another number."""
    data = bytes(buffer[: _COUNT_BYTES + count * _SEED.size].tolist())
    found, *values = struct.unpack(f"<Q{count}Q", data)
    if found != count:
        raise _other_count(found, count)
    return tuple(values)


def _codes(indices: Tensor, part: _Part, seed: int) -> Tensor:
    within = indices - part.offset
    codes = kernels.slot_codes(within, part.length, seed)
    if is_cheap_to_check(codes) and int(codes.min()) < 0:
        raise PayloadError(f"indices are not in the order of {part.slots} slots by seed {seed}")
    return codes


def _indices(buffer: Tensor, regions: Regions, runs: Sequence[int]) -> Iterator[Tensor]:
    """Return the indices of each region."""
    start = _COUNT_BYTES + len(regions) * _SEED.size
    for part, seed in zip(_parts(regions, runs), seeds(buffer, len(regions)), strict=True):
        if part.slots:
            yield _decoded(buffer[start : start + part.nbytes], part, seed)
            start += part.nbytes
        else:
            yield buffer.new_empty(0, dtype=torch.int32)


def _on_device(buffers: Tensor, regions: Regions, runs: Sequence[int]) -> Tensor:
    """Return what `read` does. Only the device knows the seeds, and the host need not."""
    start = _COUNT_BYTES + len(regions) * _SEED.size
    counts, *seeds = buffers[:, :start].contiguous().view(torch.int64).split(1, dim=1)
    refuse_if((counts != len(regions)).any(), lambda: _other_count(int(counts.max()), len(regions)))
    found = [buffers.new_empty(buffers.shape[0], 0, dtype=torch.int32)]
    for part, seed in zip(_parts(regions, runs), seeds, strict=True):
        if part.slots:
            found.append(_decoded_rows(buffers[:, start : start + part.nbytes], part, seed))
            start += part.nbytes
    return torch.cat(found, dim=1)


def _decoded_rows(packed: Tensor, part: _Part, seeds: Tensor) -> Tensor:
    _check_last_byte(packed[:, -1].amax(), part)
    codes = [kernels.unpack_bits(row, part.slots, part.bits, torch.int32) for row in packed]
    within = kernels.slot_indices_of_rows(torch.stack(codes), part.length, seeds)
    if refuse_if((within < 0).any(), lambda: _no_index(part, str(seeds.view(-1).tolist()))):
        within = within.clamp(min=0)
    return within + part.offset


def _decoded(packed: Tensor, part: _Part, seed: int) -> Tensor:
    _check_last_byte(packed[-1], part)
    codes = kernels.unpack_bits(packed, part.slots, part.bits, torch.int32)
    within = kernels.slot_indices(codes, part.length, seed)
    if int(within.min()) < 0:
        raise _no_index(part, str(seed))
    return within + part.offset


def _check_last_byte(last: Tensor, part: _Part) -> None:
    used = part.slots * part.bits % 8
    if used:
        refuse_if(known(last) >= 1 << used, partial(_not_padded, part))


def _not_padded(part: _Part) -> PayloadError:
    return PayloadError(f"the codes of {part.slots} slots are not padded with zeros")


def _no_index(part: _Part, seed: str) -> PayloadError:
    return PayloadError(f"a code of {part.slots} slots by seed {seed} stands for no index below {part.length}")


def _other_count(found: int, count: int) -> PayloadError:
    return PayloadError(f"a section of {found} regions in slot order; expected {count}")


def _parts(regions: Regions, runs: Sequence[int]) -> list[_Part]:
    return [_Part(offset, length, slots) for (offset, length), slots in zip(regions, runs, strict=True)]


def _length(regions: Regions, runs: Sequence[int]) -> int:
    parts = sum(part.nbytes for part in _parts(regions, runs) if part.slots)
    return _COUNT_BYTES + len(regions) * _SEED.size + parts

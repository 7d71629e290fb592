"""Indices in slot order: a slot's number carries part of the index, and the quotient is the rest."""

import struct
from collections.abc import Sequence
from functools import lru_cache, partial
from itertools import accumulate

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.errors import PayloadError
from thinwire.kernels import Slotted
from thinwire.kernels.memory import constant, sent_anew
from thinwire.payloads.base import Regions
from thinwire.waits import on_host, refuse_if

_COUNT_BYTES = 8
_SEED = struct.Struct("<Q")
_LARGEST_SEED = 2**64 - 1


def sections(indices: Tensor, regions: Regions, runs: tuple[int, ...], seeds: Sequence[int]) -> Sequence[Tensor]:
    """Return, as uint8, the number of regions, the seed of each, and the packed codes of each.

    Raises PayloadError unless each index (int32) is in the slot that its region's seed assigns to it, or is its
    region's last index.
    """
    head = sent_anew(lambda: _head(seeds), indices.device)
    codes, misplaced = kernels.slots_encode(indices, _parts(regions, runs), head.view(torch.int64)[1:])
    if on_host(codes) and int(misplaced):
        counts, by = (", ".join(map(str, numbers)) for numbers in (runs, seeds))
        raise PayloadError(f"indices are not in the order of {counts} slots by seed {by}")
    return head, codes


def _head(seeds: Sequence[int]) -> Tensor:
    packed = struct.pack(f"<Q{len(seeds)}Q", len(seeds), *(seed & _LARGEST_SEED for seed in seeds))
    return torch.frombuffer(bytearray(packed), dtype=torch.uint8)


def read(buffers: Tensor, regions: Regions, runs: tuple[int, ...]) -> Tensor:
    """Read the indices, int32 (ranks, count), from the ranks' sections, whose padding was checked.

    The seeds differ by rank. On a GPU only the device knows them, and the host need not. Raises PayloadError for
    another number of regions, for bits behind a region's codes, and for a code that stands for no index.
    """
    fixed = constant(_fixed(regions, runs), torch.int32, buffers.device).view(3, -1)
    section = buffers[:, : length(regions, runs)]
    if on_host(buffers):
        found, wrong = _decoded(section, regions, runs), kernels.differ(section, fixed)
        wrong = wrong | (found < 0).any()
    else:
        found, wrong = kernels.slots_read(section, fixed, _parts(regions, runs))
    refuse_if(wrong, partial(_malformed, section, fixed, regions, runs))
    return found


def _decoded(section: Tensor, regions: Regions, runs: tuple[int, ...]) -> Tensor:
    start = _COUNT_BYTES + len(regions) * _SEED.size
    seeds = section[:, _COUNT_BYTES:start].contiguous().view(torch.int64)
    return kernels.slots_decode(section[:, start:], _parts(regions, runs), seeds)


def _malformed(section: Tensor, fixed: Tensor, regions: Regions, runs: tuple[int, ...]) -> PayloadError:
    if kernels.differ(section, fixed).any():
        return _unlike(section, len(regions))
    return _no_index(_decoded(section, regions, runs), regions, runs)


def seeds(buffer: Tensor, count: int) -> tuple[int, ...]:
    """Return the seeds of `count` regions from a section. Raises PayloadError if the section has another number."""
    data = bytes(buffer[: _COUNT_BYTES + count * _SEED.size].tolist())
    found, *values = struct.unpack(f"<Q{count}Q", data)
    if found != count:
        raise _other_count([found], count)
    return tuple(values)


@lru_cache(maxsize=256)
def _fixed(regions: Regions, runs: tuple[int, ...]) -> tuple[int, ...]:
    """Return what `kernels.differ` compares: the number of regions, and the bits behind each region's codes."""
    ends = accumulate((part.nbytes for part in _parts(regions, runs)), initial=_COUNT_BYTES + len(regions) * _SEED.size)
    pairs = zip(list(ends)[1:], _parts(regions, runs), strict=True)
    last = [(end - 1, 0, 255 << used & 255) for end, part in pairs if (used := part.slots * part.bits % 8)]
    rows = [(place, byte, 255) for place, byte in enumerate(struct.pack("<Q", len(regions)))] + last
    return tuple(number for column in zip(*rows, strict=True) for number in column)


def _unlike(buffers: Tensor, count: int) -> PayloadError:
    found = buffers[:, :_COUNT_BYTES].contiguous().view(torch.int64).flatten().tolist()
    if found == [count] * len(found):
        return PayloadError("the codes of a region's slots are not padded with zeros")
    return _other_count(found, count)


def _no_index(found: Tensor, regions: Regions, runs: tuple[int, ...]) -> PayloadError:
    """Return what is wrong if an index is none, or none of its region's."""
    parts = _parts(regions, runs)
    rank, place = divmod(int((found < 0).flatten().to(torch.uint8).argmax()), found.shape[1])
    part = next(part for part, end in zip(parts, accumulate(p.slots for p in parts), strict=True) if place < end)
    return PayloadError(f"rank {rank}: a code of {part.slots} slots stands for no index below {part.length}")


def _other_count(found: Sequence[int], count: int) -> PayloadError:
    wrong = [number for number in found if number != count]
    return PayloadError(f"a section of {wrong[0]} regions in slot order; expected {count}")


@lru_cache(maxsize=256)
def _parts(regions: Regions, runs: tuple[int, ...]) -> list[Slotted]:
    return [Slotted(offset, length, slots) for (offset, length), slots in zip(regions, runs, strict=True)]


@lru_cache(maxsize=256)
def length(regions: Regions, runs: tuple[int, ...]) -> int:
    """Return the bytes of the section, without padding."""
    parts = sum(part.nbytes for part in _parts(regions, runs) if part.slots)
    return _COUNT_BYTES + len(regions) * _SEED.size + parts

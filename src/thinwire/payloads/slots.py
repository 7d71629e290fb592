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
from thinwire.payloads import wire
from thinwire.payloads.base import Regions
from thinwire.payloads.indices import is_cheap_to_check
from thinwire.waits import known, refuse_if

_COUNT_BYTES = 8
_SEED = struct.Struct("<Q")
_LARGEST_SEED = 2**64 - 1


def nbytes(regions: Regions, runs: tuple[int, ...]) -> int:
    """Return the length of the section, padding included."""
    return wire.padded(_length(regions, runs))


def section(indices: Tensor, regions: Regions, runs: tuple[int, ...], seeds: Sequence[int]) -> Tensor:
    """Return, as uint8, the number of regions, the seed of each, and the packed codes of each.

    Raises PayloadError unless each index (int32) is in the slot that its region's seed assigns to it, or is its
    region's last index.
    """
    head = sent_anew(lambda: _head(seeds), indices.device)
    codes, misplaced = kernels.slots_encode(indices, _parts(regions, runs), head.view(torch.int64)[1:])
    if is_cheap_to_check(codes) and int(misplaced):
        counts, by = (", ".join(map(str, numbers)) for numbers in (runs, seeds))
        raise PayloadError(f"indices are not in the order of {counts} slots by seed {by}")
    return torch.cat([head, codes])


def _head(seeds: Sequence[int]) -> Tensor:
    packed = struct.pack(f"<Q{len(seeds)}Q", len(seeds), *(seed & _LARGEST_SEED for seed in seeds))
    return torch.frombuffer(bytearray(packed), dtype=torch.uint8)


def read(buffers: Tensor, regions: Regions, runs: tuple[int, ...]) -> Tensor:
    """Read the indices, int32 (ranks, count), from the ranks' sections. Raises PayloadError when malformed.

    The seeds differ by rank. On a GPU only the device knows them, and the host need not.
    """
    wire.check_padding(buffers, _length(regions, runs))
    parts, start = _parts(regions, runs), _COUNT_BYTES + len(regions) * _SEED.size
    counts, seeds = buffers[:, :start].contiguous().view(torch.int64).split([1, len(regions)], dim=1)
    refuse_if(known((counts != len(regions)).any()), partial(_other_count, counts, len(regions)))
    rows = buffers[:, start : _length(regions, runs)]
    _check_last_bytes(rows, parts)
    found = kernels.slots_decode(rows, parts, seeds)
    if found.numel() and refuse_if(known((found < 0).any()), partial(_no_index, found, parts)):
        return found.clamp(min=0)
    return found


def seeds(buffer: Tensor, count: int) -> tuple[int, ...]:
    """Return the seeds of `count` regions from a section. Raises PayloadError if the section has another number."""
    data = bytes(buffer[: _COUNT_BYTES + count * _SEED.size].tolist())
    found, *values = struct.unpack(f"<Q{count}Q", data)
    if found != count:
        raise _other_count(torch.tensor(found), count)
    return tuple(values)


def _check_last_bytes(rows: Tensor, parts: Sequence[Slotted]) -> None:
    """Raise PayloadError unless the bits behind each part's codes are zero."""
    ends = accumulate(part.nbytes for part in parts)
    last = [(end - 1, part.slots * part.bits % 8) for end, part in zip(ends, parts, strict=True) if part.slots]
    places, bits = ([pair[i] for pair in last if pair[1]] for i in (0, 1))
    if places:
        found = rows.index_select(1, constant(tuple(places), torch.int64, rows.device))
        limits = constant(tuple(1 << used for used in bits), torch.int32, rows.device)
        refuse_if(known((found >= limits).any()), _not_padded)


def _not_padded() -> PayloadError:
    return PayloadError("the codes of a region's slots are not padded with zeros")


def _no_index(found: Tensor, parts: Sequence[Slotted]) -> PayloadError:
    rank, place = divmod(int((found < 0).flatten().to(torch.uint8).argmax()), found.shape[1])
    part = next(part for part, end in zip(parts, accumulate(p.slots for p in parts), strict=True) if place < end)
    return PayloadError(f"rank {rank}: a code of {part.slots} slots stands for no index below {part.length}")


def _other_count(found: Tensor, count: int) -> PayloadError:
    wrong = [number for number in found.flatten().tolist() if number != count]
    return PayloadError(f"a section of {wrong[0]} regions in slot order; expected {count}")


@lru_cache(maxsize=256)
def _parts(regions: Regions, runs: tuple[int, ...]) -> list[Slotted]:
    return [Slotted(offset, length, slots) for (offset, length), slots in zip(regions, runs, strict=True)]


@lru_cache(maxsize=256)
def _length(regions: Regions, runs: tuple[int, ...]) -> int:
    parts = sum(part.nbytes for part in _parts(regions, runs) if part.slots)
    return _COUNT_BYTES + len(regions) * _SEED.size + parts

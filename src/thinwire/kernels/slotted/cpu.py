"""Indices in slot order, region by region: the code of each slot, packed. Small regions are taken together."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from thinwire.kernels.bits.cpu import pack_bits, unpack_bits
from thinwire.kernels.compiled import compiled
from thinwire.kernels.hashing.cpu import (
    round_keys,
    slot_codes,
    slot_codes_loop,
    slot_indices,
    slot_indices_loop,
)
from thinwire.kernels.slotted.reference import Slotted

Array = np.ndarray[Any, Any]
_SMALL = 1 << 12
"""Slots up to which a region is packed bit by bit, which costs less there than a call does."""


class _Run(NamedTuple):
    """Regions that are taken together, or a large one alone: which, and where their slots and bytes lie.

    `table` has a row for each region: its offset, length, slots and bits, and where its bytes begin.
    """

    regions: slice
    slots: slice
    bytes: slice
    table: Array


def slots_encode(indices: Tensor, parts: Sequence[Slotted], seeds: Tensor) -> tuple[Tensor, Tensor]:
    packed, misplaced = [torch.empty(0, dtype=torch.uint8)], 0
    for run in _runs(tuple(parts)):
        found, wrong = _encoded(indices[run.slots], run, seeds[run.regions])
        packed.append(found)
        misplaced += wrong
    return torch.cat(packed), torch.tensor(misplaced)


def slots_decode(rows: Tensor, parts: Sequence[Slotted], seeds: Tensor) -> Tensor:
    found = torch.empty(rows.shape[0], sum(part.slots for part in parts), dtype=torch.int32)
    for run in _runs(tuple(parts)):
        for row, out, own in zip(rows[:, run.bytes], found[:, run.slots], seeds[:, run.regions], strict=True):
            _decode(row, run, own, out)
    return found


@lru_cache(maxsize=256)
def _runs(parts: tuple[Slotted, ...]) -> Sequence[_Run]:
    places = np.cumsum([(0, 0)] + [(part.slots, part.nbytes if part.slots else 0) for part in parts], axis=0)
    starts, found = places.tolist(), []
    for large, group in groupby(range(len(parts)), lambda at: parts[at].slots > _SMALL):
        for some in [[at] for at in group] if large else [list(group)]:
            first, last = some[0], some[-1] + 1
            (slots, begin), (slots_end, end) = starts[first], starts[last]
            rows = [(*parts[at], parts[at].bits, starts[at][1] - begin) for at in some]
            found.append(_Run(slice(first, last), slice(slots, slots_end), slice(begin, end), np.array(rows, np.int64)))
    return found


def _encoded(indices: Tensor, run: _Run, seeds: Tensor) -> tuple[Tensor, int]:
    """Return the packed codes of a run, and how many of its indices are in no slot."""
    if len(run.table) == 1 and run.table[0, 2] > _SMALL:
        offset, length, _, bits, _ = run.table[0].tolist()
        codes = slot_codes(indices - offset, length, int(seeds))
        return pack_bits(codes, bits), int((codes.numpy() < 0).sum())
    packed = torch.empty(run.bytes.stop - run.bytes.start, dtype=torch.uint8)
    return packed, _encode_loop(indices.numpy(), run.table, round_keys(seeds.tolist()), packed.numpy())


def _decode(row: Tensor, run: _Run, seeds: Tensor, out: Tensor) -> None:
    """Write the indices of a run, from its bytes."""
    if len(run.table) == 1 and run.table[0, 2] > _SMALL:
        offset, length, slots, bits, _ = run.table[0].tolist()
        within = slot_indices(unpack_bits(row, slots, bits, torch.int32), length, int(seeds))
        out.copy_(torch.where(within < 0, -1, within + offset))
        return
    _decode_loop(row.numpy(), run.table, round_keys(seeds.tolist()), out.numpy())


@compiled
def _encode_loop(indices, table, keys, packed):
    misplaced, first = 0, 0
    for at in range(len(table)):
        offset, length, slots, bits, start = table[at]
        codes = np.empty(slots, np.int32)
        within = indices[first : first + slots] - np.int32(offset)
        slot_codes_loop(within, length, np.uint32(-(-length // max(1, slots))), keys[at], codes)
        low, word, filled, place = np.uint64((1 << bits) - 1), np.uint64(0), 0, start
        for i in range(slots):
            misplaced += codes[i] < 0
            word |= (np.uint64(codes[i]) & low) << np.uint64(filled)
            filled += bits
            while filled >= 8:
                packed[place] = np.uint8(word & np.uint64(0xFF))
                word >>= np.uint64(8)
                filled -= 8
                place += 1
        if filled:
            packed[place] = np.uint8(word)
        first += slots
    return misplaced


@compiled
def _decode_loop(row, table, keys, out):
    first = 0
    for at in range(len(table)):
        offset, length, slots, bits, place = table[at]
        codes, indices = np.empty(slots, np.int32), out[first : first + slots]
        low, word, filled = np.uint64((1 << bits) - 1), np.uint64(0), 0
        for i in range(slots):
            while filled < bits:
                word |= np.uint64(row[place]) << np.uint64(filled)
                filled += 8
                place += 1
            codes[i] = word & low
            word >>= np.uint64(bits)
            filled -= bits
        slot_indices_loop(codes, length, np.uint32(-(-length // max(1, slots))), keys[at], indices)
        for i in range(slots):
            if indices[i] >= 0:
                indices[i] += np.int32(offset)
        first += slots

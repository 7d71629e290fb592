"""Indices in slot order, region by region: the code of each slot, packed."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.kernels.bits.reference import pack_bits, unpack_bits
from thinwire.kernels.hashing.reference import slot_codes, slot_indices_of_rows


class Slotted(NamedTuple):
    """`length` elements of a vector from `offset` on, of which some lie in `slots` slots."""

    offset: int
    length: int
    slots: int

    @property
    def empty(self) -> int:
        """The code of an empty slot: the one after all quotients."""
        return -(-self.length // max(1, self.slots))

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return self.empty.bit_length()

    @property
    def nbytes(self) -> int:
        """Bytes of all codes."""
        return -(-self.slots * self.bits // 8)


def slots_encode(indices: Tensor, parts: Sequence[Slotted], seeds: Tensor) -> tuple[Tensor, Tensor]:
    """Return the packed `slot_codes` of each part, uint8, one part's after another's, and how many are in no slot.

    `indices` (int32) are those of one part after another, counted from the vector's first element; `seeds` (int64) has
    one for each part. An index that is not in the slot to which its seed assigns it counts, and its code means nothing.
    """
    packed, misplaced = [indices.new_empty(0, dtype=torch.uint8)], []
    for part, index, seed in zip(parts, indices.split([part.slots for part in parts]), seeds.tolist(), strict=True):
        if part.slots:
            codes = slot_codes(index - part.offset, part.length, seed)
            misplaced.append(codes < 0)
            packed.append(pack_bits(codes, part.bits))
    return torch.cat(packed), torch.cat([indices.new_empty(0, dtype=torch.bool), *misplaced]).sum()


def slots_decode(rows: Tensor, parts: Sequence[Slotted], seeds: Tensor) -> Tensor:
    """Return the indices (int32) that `slots_encode` packed into each of the rows (n, bytes), or −1: (n, slots).

    `seeds` (int64): (n, parts), as each row has its own. Where a code stands for no index, −1 is returned.
    """
    found, start = [rows.new_empty(rows.shape[0], 0, dtype=torch.int32)], 0
    for at, part in enumerate(parts):
        if part.slots:
            packed = rows[:, start : start + part.nbytes]
            codes = torch.stack([unpack_bits(row, part.slots, part.bits, torch.int32) for row in packed])
            within = slot_indices_of_rows(codes, part.length, seeds[:, at, None])
            found.append(torch.where(within < 0, -1, within + part.offset))
            start += part.nbytes
    return torch.cat(found, dim=1)

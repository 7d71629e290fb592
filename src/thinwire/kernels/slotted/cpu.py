"""Indices in slot order, region by region: the code of each slot, packed."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from thinwire.kernels.bits.cpu import pack_bits, unpack_bits
from thinwire.kernels.hashing.cpu import slot_codes, slot_indices
from thinwire.kernels.slotted.reference import Slotted


def slots_encode(indices: Tensor, parts: Sequence[Slotted], seeds: Tensor) -> tuple[Tensor, Tensor]:
    """See `reference.slots_encode`."""
    packed, misplaced = [torch.empty(0, dtype=torch.uint8)], 0
    for part, index, seed in zip(parts, indices.split([part.slots for part in parts]), seeds.tolist(), strict=True):
        if part.slots:
            codes = slot_codes(index - part.offset, part.length, seed)
            misplaced += int((codes.numpy() < 0).sum())
            packed.append(pack_bits(codes, part.bits))
    return torch.cat(packed), torch.tensor(misplaced)


def slots_decode(rows: Tensor, parts: Sequence[Slotted], seeds: Tensor) -> Tensor:
    """See `reference.slots_decode`."""
    return torch.stack(
        [torch.cat([*_decoded(row, parts, seed)]) for row, seed in zip(rows, seeds.tolist(), strict=True)]
    )


def _decoded(row: Tensor, parts: Sequence[Slotted], seeds: Sequence[int]) -> Iterator[Tensor]:
    yield torch.empty(0, dtype=torch.int32)
    start = 0
    for part, seed in zip(parts, seeds, strict=True):
        if part.slots:
            codes = unpack_bits(row[start : start + part.nbytes], part.slots, part.bits, torch.int32)
            within = slot_indices(codes, part.length, seed)
            yield torch.where(within < 0, -1, within + part.offset) if part.offset else within
            start += part.nbytes

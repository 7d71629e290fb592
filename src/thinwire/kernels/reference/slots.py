"""Vectors in slot order: a number for each slot, from which its index follows."""

import torch
from torch import Tensor

from thinwire.kernels.reference.hashing import index_of, slot_of


def slot_codes(indices: Tensor, numel: int, seed: int) -> Tensor:
    """Return a code (int32) for each index (int32): its quotient (`slot_of`), where it lies in its own slot.

    The last index below `numel` in another slot stands for an empty one, and has the code after all quotients; any
    other is out of order, and has −1.
    """
    slots, last = indices.numel(), numel - 1
    slot, quotient = slot_of(indices.clamp(0, last), slots, numel, seed)
    placed = (slot == torch.arange(slots, device=indices.device)) & (indices >= 0) & (indices <= last)
    elsewhere = torch.where(indices == last, -(-numel // max(1, slots)), -1)
    return torch.where(placed, quotient, elsewhere).to(torch.int32)


def slot_indices(codes: Tensor, numel: int, seed: int) -> Tensor:
    """Return the indices (int32) that `slot_codes` named by codes (int32); −1 where a code stands for none."""
    slots = codes.numel()
    empty = -(-numel // max(1, slots))
    slot = torch.arange(slots, device=codes.device)
    indices = index_of(slot, codes.clamp(0, max(0, empty - 1)), slots, numel, seed)
    indices = torch.where((codes >= 0) & (codes < empty) & (indices < numel), indices, -1)
    return torch.where(codes == empty, numel - 1, indices).to(torch.int32)

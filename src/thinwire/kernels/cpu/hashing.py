"""A hash of indices, and a table of slots."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinwire.kernels.loops import hashing as loops
from thinwire.kernels.reference.hashing import keys, mix

__all__ = ["hashed_slots", "index_of", "keys", "mix", "slot_of"]


def slot_of(indices: Tensor, slots: int, numel: int, seed: int) -> tuple[Tensor, Tensor]:
    """See `reference.slot_of`."""
    slot, quotient = np.empty(indices.numel(), np.int64), np.empty(indices.numel(), np.int64)
    loops.slots_of(indices.numpy(), slots, -(-numel // max(1, slots)), round_keys(seed), slot, quotient)
    return torch.from_numpy(slot), torch.from_numpy(quotient)


def index_of(slot: Tensor, quotient: Tensor, slots: int, numel: int, seed: int) -> Tensor:
    """See `reference.index_of`."""
    indices = np.empty(slot.numel(), np.int64)
    loops.indices_of(slot.numpy(), quotient.numpy(), slots, -(-numel // max(1, slots)), round_keys(seed), indices)
    return torch.from_numpy(indices)


def hashed_slots(indices: Tensor, priorities: Tensor, slots: int, numel: int, seed: int) -> Tensor:
    """See `reference.hashed_slots`."""
    table = np.full(slots, -1, np.int64)
    height = -(-numel // max(1, slots))
    loops.hashed_slots(table, indices.numpy(), priorities.numpy(), height, round_keys(seed))
    return torch.from_numpy(table.astype(np.int32))


def round_keys(seed: int) -> np.ndarray[Any, Any]:
    """Return the keys of the three rounds."""
    return np.array([keys(3 * seed + j) for j in range(3)], np.uint64)

"""Vectors in slot order."""

import numpy as np
import torch
from torch import Tensor

from thinwire.kernels.cpu.hashing import round_keys
from thinwire.kernels.loops import slots as loops


def slot_codes(indices: Tensor, numel: int, seed: int) -> Tensor:
    """See `reference.slot_codes`."""
    codes = np.empty(indices.numel(), np.int32)
    loops.slot_codes(indices.numpy(), numel, -(-numel // max(1, codes.size)), round_keys(seed), codes)
    return torch.from_numpy(codes)


def slot_indices(codes: Tensor, numel: int, seed: int) -> Tensor:
    """See `reference.slot_indices`."""
    indices = np.empty(codes.numel(), np.int32)
    loops.slot_indices(codes.numpy(), numel, -(-numel // max(1, indices.size)), round_keys(seed), indices)
    return torch.from_numpy(indices)

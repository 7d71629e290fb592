"""Memory for results, in huge pages if it is large."""

import numpy as np
import torch
from torch import Tensor

_LARGE = 1 << 22
_CACHE_LINE = 64


def empty(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an uninitialised tensor (numel). A large one in main memory begins at a multiple of 64 bytes.

    From 4 MiB on, NumPy asks the system for huge pages, and torch does not. That matters: in small pages, the first
    write to 127 MB takes several times as long as the second one.
    """
    nbytes = numel * dtype.itemsize
    if device.type != "cpu" or nbytes < _LARGE:
        return torch.empty(numel, dtype=dtype, device=device)
    room = torch.from_numpy(np.empty(nbytes + _CACHE_LINE, np.uint8))
    start = -room.data_ptr() % _CACHE_LINE
    return room[start : start + nbytes].view(dtype)

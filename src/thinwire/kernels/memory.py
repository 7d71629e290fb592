"""Room for results: what was never touched costs more than to write it, page by page."""

import numpy as np
import torch
from torch import Tensor

_LEAST = 1 << 22
_LINE = 64


def empty(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor (numel) of anything, from a multiple of 64 bytes on where it is large and in main memory.

    There it lies in huge pages if the system gives them to those who ask, as Numpy does from 4 MiB on and torch does
    not: the first touch of 127 MB in small pages takes several times as long as writing them again.
    """
    nbytes = numel * dtype.itemsize
    if device.type != "cpu" or nbytes < _LEAST:
        return torch.empty(numel, dtype=dtype, device=device)
    room = torch.from_numpy(np.empty(nbytes + _LINE, np.uint8))
    start = -room.data_ptr() % _LINE
    return room[start : start + nbytes].view(dtype)

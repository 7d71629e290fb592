"""Memory for results, in huge pages if it is large; and numbers on their way to a device."""

import struct
from functools import lru_cache

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


@lru_cache(maxsize=1024)
def constant(numbers: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return numbers on a device. Cached, because layouts stay the same; do not write to it."""
    if not numbers:
        return torch.empty(0, dtype=dtype, device=device)
    wide, code = (torch.float64, "d") if dtype.is_floating_point else (torch.int64, "q")
    packed = bytearray(struct.pack(f"={len(numbers)}{code}", *numbers))
    return sent(torch.frombuffer(packed, dtype=wide).to(dtype), device)


def sent(x: Tensor, device: torch.device) -> Tensor:
    """Return a tensor in main memory on a device. The host does not wait, as the copy leaves from pinned memory."""
    if device.type == "cpu":
        return x
    pinned = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    return pinned.copy_(x).to(device, non_blocking=True)

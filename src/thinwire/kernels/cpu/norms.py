"""Norms of groups."""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinwire.kernels.cpu.ranges import map_ranges
from thinwire.kernels.loops import norms as loops

_CHUNK = 1 << 14


def group_norms(x: Tensor, group: int, order: float) -> Tensor:
    """See `reference.group_norms`; long groups are taken in pieces, always the same ones."""
    if group > _CHUNK < x.numel():
        parts = [_parts(part, _CHUNK, order) for part in x.split(group)]
        found = np.array([part.max() if order == math.inf else part.sum() for part in parts])
    else:
        found = _parts(x, group, order)
    return torch.from_numpy(np.sqrt(found) if order == 2 else found)


def _parts(x: Tensor, group: int, order: float) -> np.ndarray[Any, Any]:
    """Return the largest magnitude, or the sum of magnitudes or squares, of each `group` elements, float64."""
    count = -(-x.numel() // group)
    if order == math.inf:
        bits, peaks = x.numpy().view(np.int32), np.empty(count, np.int32)
        map_ranges(lambda lo, hi: loops.group_peaks(peaks, bits, group, lo, hi), x.numel(), align=group)
        return peaks.view(np.float32).astype(np.float64)
    sums = np.empty(count, np.float64)
    map_ranges(lambda lo, hi: loops.group_sums(sums, x.numpy(), group, order, lo, hi), x.numel(), align=group)
    return sums

"""Fourier transforms back."""

from math import sqrt
from typing import Any

import numpy as np
from torch import Tensor

from thinwire.kernels.cpu.ranges import map_ranges
from thinwire.kernels.loops import fourier as loops
from thinwire.kernels.memory import empty
from thinwire.kernels.reference.fourier import radices, turns

_LINE = 64
_VECTOR = 32


def inverse_fourier(pairs: Tensor, numel: int, width: int) -> Tensor:
    """See `reference.inverse_fourier`: the same bits."""
    out, lanes = empty(numel, pairs.dtype, pairs.device), _VECTOR // pairs.element_size()
    cos, sin = (part.numpy() for part in turns(width, pairs.dtype))
    dtype = cos.dtype.type
    arrays = (out.numpy(), pairs.numpy(), cos, sin, np.array(radices(width)), dtype(1 / sqrt(width)))

    def run(lo: int, hi: int) -> None:
        x, y = (_aligned(2 * lanes * width, dtype) for _ in range(2))
        loops.inverse_fourier(*arrays, x, y, lo, hi)

    map_ranges(run, numel, align=2 * lanes * width)
    return out


def _aligned(count: int, dtype: Any) -> np.ndarray[Any, Any]:
    """Return room that begins with a line of the cache, lest every vector lie in two."""
    room = np.empty(count + _LINE, dtype)
    start = -room.ctypes.data % _LINE // room.itemsize
    return room[start : start + count]

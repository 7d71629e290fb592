"""Numbers as codes of a few bits, and back."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinwire.kernels.cpu.ranges import map_ranges
from thinwire.kernels.loops import codes as loops
from thinwire.kernels.memory import empty
from thinwire.kernels.reference.codes import OffsetGrid, Rounding
from thinwire.kernels.reference.hashing import keys

_ALIGN = 64


def offset_encode(
    codes: Tensor, x: Tensor, scales: Tensor, group: int, grid: OffsetGrid, rounding: Rounding, seed: int
) -> None:
    """See `reference.offset_encode`."""
    counts = tuple(np.int32(each) for each in grid)
    smallest = np.int32(grid.base << grid.shift).view(np.float32)
    if rounding == "stochastic":
        _encode(loops.offset_encode_stochastic, codes, x, scales, group, counts, smallest, *_keys(seed))
        return
    half, first = (
        ((1 << grid.shift) >> 1, np.float32(smallest / 2)) if rounding == "nearest" else (0, np.float32(np.inf))
    )
    _encode(loops.offset_encode, codes, x, scales, group, counts, np.int32(half), first.view(np.int32))


def levels_encode(codes: Tensor, x: Tensor, scales: Tensor, group: int, levels: int, seed: int) -> None:
    """See `reference.levels_encode`."""
    _encode(loops.levels_encode, codes, x, scales, group, np.float32(levels), *_keys(seed))


def ternary_encode(codes: Tensor, x: Tensor, scales: Tensor, group: int, seed: int) -> None:
    """See `reference.ternary_encode`."""
    _encode(loops.ternary_encode, codes, x, scales, group, *_keys(seed))


def sign_encode(codes: Tensor, x: Tensor) -> None:
    """See `reference.sign_encode`."""
    out, given = codes.numpy(), x.numpy()
    map_ranges(lambda lo, hi: loops.sign_encode(out[lo:hi], given[lo:hi]), x.numel(), align=_ALIGN)


def table_decode(out: Tensor, codes: Tensor, table: Tensor, scales: Tensor, group: int) -> None:
    """See `reference.table_decode`."""
    wide = out if out.dtype in (torch.float32, torch.float64) else empty(out.numel(), torch.float32, out.device)
    arrays = [t.numpy() for t in (wide, codes, table, scales)]
    map_ranges(lambda lo, hi: loops.table_decode(*arrays, group, lo, hi), codes.numel(), align=_ALIGN)
    if wide is not out:
        out.copy_(wide)


def _encode(kernel: Callable[..., None], codes: Tensor, x: Tensor, scales: Tensor, group: int, *rest: Any) -> None:
    arrays = [t.numpy() for t in (codes, x, scales)]
    map_ranges(lambda lo, hi: kernel(*arrays, group, lo, hi, *rest), x.numel(), align=_ALIGN)


def _keys(seed: int) -> tuple[Any, Any]:
    high, low = keys(seed)
    return np.uint32(high), np.uint32(low)

"""Thin factors of a matrix, and sums."""

import torch
from torch import Tensor

from thinwire.kernels.cpu.ranges import map_ranges
from thinwire.kernels.loops import factors as loops
from thinwire.kernels.memory import empty


def row_sums(rows: Tensor) -> Tensor:
    """See `reference.row_sums`: the same bits."""
    out = empty(rows.shape[1], rows.dtype, rows.device)
    arrays = (out.numpy(), rows.numpy())
    map_ranges(lambda lo, hi: loops.row_sums(*arrays, lo, hi), out.numel())
    return out


def outer_sums(out: Tensor, a: Tensor, b: Tensor) -> None:
    """See `reference.outer_sums`: the same bits."""
    width = max(1, out.shape[1])
    arrays = (out.numpy(), a.numpy(), b.T.contiguous().numpy())
    map_ranges(lambda lo, hi: loops.outer_sums(*arrays, lo // width, hi // width), out.numel(), align=width)


def orthonormal(x: Tensor) -> Tensor:
    """See `reference.orthonormal`: the same bits."""
    columns = x.T.to(torch.float64, copy=True, memory_format=torch.contiguous_format)
    peak = columns.abs().amax()
    columns /= torch.where(peak > 0, peak, 1.0)
    q = torch.eye(*columns.shape, dtype=torch.float64)
    loops.orthonormal(columns.numpy(), q.numpy())
    return q.T.to(x.dtype).contiguous()

"""Sums of rows, products with thin factors and orthonormal columns, with the same bits as the reference."""

import numpy as np
import torch
from torch import Tensor

from thinwire.kernels.compiled import exactly
from thinwire.kernels.memory import empty
from thinwire.kernels.ranges import map_ranges

_TILE = 2048


def row_sums(rows: Tensor) -> Tensor:
    out = empty(rows.shape[1], rows.dtype, rows.device)
    arrays = (out.numpy(), rows.numpy())
    map_ranges(lambda lo, hi: _row_sums_loop(*arrays, lo, hi), out.numel())
    return out


def outer_sums(out: Tensor, a: Tensor, b: Tensor) -> None:
    width = max(1, out.shape[1])
    arrays = (out.numpy(), a.numpy(), b.T.contiguous().numpy())
    map_ranges(lambda lo, hi: _outer_sums_loop(*arrays, lo // width, hi // width), out.numel(), align=width)


def orthonormal(x: Tensor) -> Tensor:
    columns = x.T.to(torch.float64, copy=True, memory_format=torch.contiguous_format)
    peak = columns.abs().amax()
    columns /= torch.where(peak > 0, peak, 1.0)
    q = torch.eye(*columns.shape, dtype=torch.float64)
    _orthonormal_loop(columns.numpy(), q.numpy())
    return q.T.to(x.dtype).contiguous()


@exactly
def put(out, x):
    """Write an array to another. Numba would take seconds to compile `out[:] = x`, for the text of its error."""
    for i in range(out.size):
        out[i] = x[i]


@exactly
def add(out, x):
    """Add an array to another."""
    for i in range(out.size):
        out[i] += x[i]


@exactly
def _row_sums_loop(out, rows, lo, hi):
    for start in range(lo, hi, _TILE):
        stop = min(start + _TILE, hi)
        part = out[start:stop]
        put(part, rows[0, start:stop])
        for k in range(1, rows.shape[0]):
            add(part, rows[k, start:stop])


@exactly
def _scale(out, factor, x):
    for i in range(out.size):
        out[i] = factor * x[i]


@exactly
def _add_scaled(out, factor, x):
    for i in range(out.size):
        out[i] += factor * x[i]


@exactly
def _outer_sums_loop(out, a, b, lo, hi):
    # Rows lo to hi; b is of shape (r, m).
    for start in range(0, out.shape[1], _TILE):
        stop = min(start + _TILE, out.shape[1])
        for i in range(lo, hi):
            part = out[i, start:stop]
            _scale(part, a[i, 0], b[0, start:stop])
            for j in range(1, a.shape[1]):
                _add_scaled(part, a[i, j], b[j, start:stop])


@exactly
def _sum(x):
    size = x.size
    while size > 1:
        half = (size + 1) // 2
        add(x[: size - half], x[half:size])
        size = half
    return x[0]


@exactly
def _product(x, y, room):
    for i in range(x.size):
        room[i] = x[i] * y[i]
    return _sum(room[: x.size])


@exactly
def _reflect(y, v, factor, room):
    _add_scaled(y, -(factor * _product(v, y, room)), v)


@exactly
def _orthonormal_loop(columns, q):
    # Columns are rows here. Each one is overwritten with its vector of reflection.
    room, factors = np.empty(columns.shape[1]), np.empty(columns.shape[0])
    for j in range(columns.shape[0]):
        v = columns[j, j:]
        norm = np.sqrt(_product(v, v, room))
        beta = norm if v[0] < 0 else -norm
        squares = beta * beta - v[0] * beta
        v[0] -= beta
        factors[j] = 1 / squares if squares > 0 else 0.0
        for other in range(j + 1, columns.shape[0]):
            _reflect(columns[other, j:], v, factors[j], room)
    for j in range(columns.shape[0] - 1, -1, -1):
        for other in range(j, columns.shape[0]):
            _reflect(q[other, j:], columns[j, j:], factors[j], room)

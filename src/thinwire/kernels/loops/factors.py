"""Thin factors of a matrix, and sums, every product and sum rounded on its own and in one order."""

import numpy as np

from thinwire.kernels.loops.codes import exactly

_TILE = 2048


@exactly
def _add(out, x):
    for i in range(out.size):
        out[i] += x[i]


@exactly
def row_sums(out, rows, lo, hi):
    for start in range(lo, hi, _TILE):
        stop = min(start + _TILE, hi)
        part = out[start:stop]
        part[:] = rows[0, start:stop]
        for k in range(1, rows.shape[0]):
            _add(part, rows[k, start:stop])


@exactly
def _scale(out, factor, x):
    for i in range(out.size):
        out[i] = factor * x[i]


@exactly
def _add_scaled(out, factor, x):
    for i in range(out.size):
        out[i] += factor * x[i]


@exactly
def outer_sums(out, a, b, lo, hi):
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
        _add(x[: size - half], x[half:size])
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
def orthonormal(columns, q):
    # Columns are rows here; what was reflected makes room for the vectors of reflection.
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

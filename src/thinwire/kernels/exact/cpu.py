"""Sums of rows, thin products, orthonormal columns and inverse Fourier transforms, with the same bits as the reference.

Each lane of a 32-byte vector runs a complex transform, and each complex transform carries two real ones. Number k of
all these transforms takes two vectors, 2k and 2k + 1: real parts, then imaginary parts. Every product, sum and
difference is rounded on its own, in the order written here, so the bits are the same on every processor.
"""

from math import sqrt
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from torch import Tensor

from thinwire.kernels.compiled import exactly
from thinwire.kernels.exact.reference import radices, turns
from thinwire.kernels.memory import empty
from thinwire.kernels.ranges import map_ranges
from thinwire.kernels.simd import Code, emitted

_TILE, _VECTOR = 2048, 32


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
    q = torch.eye(*columns.shape, dtype=torch.float64, device="cpu")
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


def inverse_fourier(pairs: Tensor, numel: int, width: int) -> Tensor:
    out, lanes = empty(numel, pairs.dtype, pairs.device), _VECTOR // pairs.element_size()
    cos, sin = (part.numpy() for part in turns(width, pairs.dtype))
    arrays = (out.numpy(), pairs.numpy(), cos, sin, np.array(radices(width)), cos.dtype.type(1 / sqrt(width)))

    def run(lo: int, hi: int) -> None:
        # Torch's memory begins at a cache line, so that no vector lies in two.
        x, y = (torch.empty(2 * lanes * width, dtype=pairs.dtype, device="cpu").numpy() for _ in range(2))
        _inverse_loop(*arrays, x, y, lo, hi)

    map_ranges(run, numel, align=2 * lanes * width)
    return out


_Number = tuple[Any, Any]


class _Code(Code):
    """Instructions on complex vectors."""

    def __init__(self, builder: Any, dtype: Any) -> None:
        super().__init__(builder, dtype, lanes=256 // dtype.bitwidth)

    def number(self, data: Any, at: Any) -> _Number:
        """Load complex number `at`."""
        real, imaginary = (self.load(data, place) for place in self._places(at))
        return real, imaginary

    def put(self, data: Any, at: Any, number: _Number) -> None:
        """Write complex number `at`."""
        for place, vector in zip(self._places(at), number, strict=True):
            self.store(data, place, vector)

    def weight(self, cos: Any, sin: Any, at: Any) -> _Number:
        """Return cos[at] + i·sin[at] in every lane."""
        return self.spread(self.element(cos, at)), self.spread(self.element(sin, at))

    def add(self, a: _Number, b: _Number) -> _Number:
        """Return a + b."""
        return self.builder.fadd(a[0], b[0]), self.builder.fadd(a[1], b[1])

    def subtract(self, a: _Number, b: _Number) -> _Number:
        """Return a − b."""
        return self.builder.fsub(a[0], b[0]), self.builder.fsub(a[1], b[1])

    def turned(self, a: _Number, b: _Number) -> _Number:
        """Return a · b."""
        multiply = self.builder.fmul
        real = self.builder.fsub(multiply(a[0], b[0]), multiply(a[1], b[1]))
        return real, self.builder.fadd(multiply(a[0], b[1]), multiply(a[1], b[0]))

    def quarter_turn(self, a: _Number, b: _Number) -> _Number:
        """Return i · (a − b)."""
        return self.builder.fsub(b[1], a[1]), self.builder.fsub(a[0], b[0])

    def _places(self, at: Any) -> list[Any]:
        """Return where the two parts of complex number `at` begin."""
        return [self.index(ir.Constant(at.type, part * self.count), (2 * self.count, at)) for part in (0, 1)]


_intrinsic = emitted(whole=types.intp, code=_Code)


@_intrinsic
def _two(code: _Code, x: Any, at: Any, far: Any, y: Any, to: Any, near: Any, cos: Any, sin: Any, turn: Any) -> None:
    """Of a and b at `at` + m · `far`, write a + b and (a - b)·w to `to` + j · `near`; w is number `turn`."""
    a, b = (code.number(x, code.index(at, (m, far))) for m in range(2))
    code.put(y, to, code.add(a, b))
    code.put(y, code.index(to, (1, near)), code.turned(code.subtract(a, b), code.weight(cos, sin, turn)))


@_intrinsic
def _four(code: _Code, x: Any, at: Any, far: Any, y: Any, to: Any, near: Any, cos: Any, sin: Any, turn: Any) -> None:
    """Of a to d: (a + c) + (b + d), (a - c + i(b - d))·w, (a + c - (b + d))·w², (a - c - i(b - d))·w³."""
    a, b, c, d = (code.number(x, code.index(at, (m, far))) for m in range(4))
    even, odd, sum_, turned = code.add(a, c), code.subtract(a, c), code.add(b, d), code.quarter_turn(b, d)
    turns = [code.weight(cos, sin, code.index(ir.Constant(turn.type, 0), (j, turn))) for j in range(4)]
    code.put(y, to, code.add(even, sum_))
    for j, found in ((1, code.add(odd, turned)), (2, code.subtract(even, sum_)), (3, code.subtract(odd, turned))):
        code.put(y, code.index(to, (j, near)), code.turned(found, turns[j]))


@_intrinsic
def _set_turned(code: _Code, y: Any, to: Any, x: Any, at: Any, cos: Any, sin: Any, turn: Any) -> None:
    """Write x[at]·w to y[to]."""
    code.put(y, to, code.turned(code.number(x, at), code.weight(cos, sin, turn)))


@_intrinsic
def _add_turned(code: _Code, y: Any, to: Any, x: Any, at: Any, cos: Any, sin: Any, turn: Any) -> None:
    """Add x[at]·w to y[to]."""
    product = code.turned(code.number(x, at), code.weight(cos, sin, turn))
    code.put(y, to, code.add(code.number(y, to), product))


@exactly
def _inverse_loop(out, pairs, cos, sin, radices, scale, x, y, lo, hi):
    # Elements lo to hi, where lo begins a block. x and y have room for one vector of transforms.
    width = cos.size
    lanes = x.size // (2 * width)
    for start in range(lo, hi, 2 * lanes * width):
        _load(x, pairs, start // width, lanes, width)
        rest, span = width, 1
        for radix in radices:
            rest //= radix
            _stage(x, y, radix, rest, span, cos, sin)
            x, y = y, x
            span *= radix
        _store(out[:hi], x, start, lanes, width, scale)


@exactly
def _load(x, pairs, first, lanes, width):
    # Each lane takes a pair of blocks A and B: A + iB at frequency k, and conj(A) + i·conj(B) at −k.
    row = width // 2 + 1
    for lane in range(lanes):
        a, b = (first + 2 * lane) * row, (first + 2 * lane + 1) * row
        for k in range(row):
            ar = ai = br = bi = x.dtype.type(0)
            real = k == 0 or 2 * k == width  # such a coefficient has no imaginary part
            if a + k < pairs.shape[0]:
                ar, ai = pairs[a + k, 0], ai if real else pairs[a + k, 1]
            if b + k < pairs.shape[0]:
                br, bi = pairs[b + k, 0], bi if real else pairs[b + k, 1]
            at, mirrored = 2 * k * lanes + lane, 2 * (width - k) * lanes + lane
            x[at], x[at + lanes] = ar - bi, ai + br
            if not real:
                x[mirrored], x[mirrored + lanes] = ar + bi, br - ai


@exactly
def _stage(x, y, radix, rest, span, cos, sin):
    # Stockham's step: combines numbers that are `rest` groups of `span` apart and writes the results side by side.
    far = rest * span
    for p in range(rest):
        turn = p * span
        for q in range(span):
            at, to = p * span + q, radix * p * span + q
            if radix == 4:
                _four(x, at, far, y, to, span, cos, sin, turn)
            elif radix == 2:
                _two(x, at, far, y, to, span, cos, sin, turn)
            else:
                _sums(x, at, far, y, to, span, radix, turn, cos, sin)


@exactly
def _sums(x, at, far, y, to, span, radix, turn, cos, sin):
    size = cos.size
    for j in range(radix):
        _set_turned(y, to + j * span, x, at, cos, sin, j * turn)
        for m in range(1, radix):
            _add_turned(y, to + j * span, x, at + m * far, cos, sin, j * (turn + m * (size // radix)) % size)


@exactly
def _store(out, x, start, lanes, width, scale):
    for lane in range(lanes):
        a, b = start + 2 * lane * width, start + (2 * lane + 1) * width
        for k in range(min(width, out.size - a)):
            out[a + k] = x[2 * k * lanes + lane] * scale
        for k in range(min(width, out.size - b)):
            out[b + k] = x[(2 * k + 1) * lanes + lane] * scale

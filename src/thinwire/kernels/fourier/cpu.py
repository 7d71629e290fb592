"""Inverse Fourier transforms, with the same bits as the reference.

Each lane of a 32-byte vector runs a complex transform, and each complex transform carries two real ones.
"""

from math import sqrt
from typing import Any

import numpy as np
from torch import Tensor

from thinwire.kernels.compiled import exactly
from thinwire.kernels.fourier import butterflies
from thinwire.kernels.fourier.reference import radices, turns
from thinwire.kernels.memory import empty
from thinwire.kernels.ranges import map_ranges

_LINE = 64
_VECTOR = 32


def inverse_fourier(pairs: Tensor, numel: int, width: int) -> Tensor:
    out, lanes = empty(numel, pairs.dtype, pairs.device), _VECTOR // pairs.element_size()
    cos, sin = (part.numpy() for part in turns(width, pairs.dtype))
    dtype = cos.dtype.type
    arrays = (out.numpy(), pairs.numpy(), cos, sin, np.array(radices(width)), dtype(1 / sqrt(width)))

    def run(lo: int, hi: int) -> None:
        x, y = (_aligned(2 * lanes * width, dtype) for _ in range(2))
        _inverse_loop(*arrays, x, y, lo, hi)

    map_ranges(run, numel, align=2 * lanes * width)
    return out


def _aligned(count: int, dtype: Any) -> np.ndarray[Any, Any]:
    """Return an uninitialised array that begins at a cache line, so that no vector lies in two."""
    room = np.empty(count + _LINE, dtype)
    start = -room.ctypes.data % _LINE // room.itemsize
    return room[start : start + count]


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
                butterflies.four(x, at, far, y, to, span, cos, sin, turn)
            elif radix == 2:
                butterflies.two(x, at, far, y, to, span, cos, sin, turn)
            else:
                _sums(x, at, far, y, to, span, radix, turn, cos, sin)


@exactly
def _sums(x, at, far, y, to, span, radix, turn, cos, sin):
    size = cos.size
    for j in range(radix):
        butterflies.set_turned(y, to + j * span, x, at, cos, sin, j * turn)
        for m in range(1, radix):
            butterflies.add_turned(y, to + j * span, x, at + m * far, cos, sin, j * (turn + m * (size // radix)) % size)


@exactly
def _store(out, x, start, lanes, width, scale):
    for lane in range(lanes):
        a, b = start + 2 * lane * width, start + (2 * lane + 1) * width
        for k in range(min(width, out.size - a)):
            out[a + k] = x[2 * k * lanes + lane] * scale
        for k in range(min(width, out.size - b)):
            out[b + k] = x[(2 * k + 1) * lanes + lane] * scale

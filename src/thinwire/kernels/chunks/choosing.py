"""The transform of every chunk, and its largest coefficients.

A chunk lies in a buffer whose rows are whole vectors of 64 bytes. Lanes beyond the chunk's width hold anything, and so
do rows that fill up a group. A `shape` is the tensor's columns, and a chunk's height and width.
"""

import numpy as np

from thinwire.kernels import simd
from thinwire.kernels.chunks import vectors
from thinwire.kernels.compiled import compiled

_STRIP = 1 << 15
"""How many elements are accumulated before their chunks are transformed, at least: they are still in the cache."""
_MOST_32, _MOST_64 = np.iinfo(np.int32).max, np.iinfo(np.int64).max


@compiled
def topk(x, shape, plain, a, b, first, last, positions, values):
    # The largest coefficients of chunks `first` to `last`.
    _topk(x, shape, plain, a, b, first, last, positions, values, _buffers(x, a, b))


@compiled
def fading_topk(out, residual, gradient, scale, decay, shape, plain, a, b, first, last, positions, values):
    # The same of out = decay · residual + scale · gradient, strip by strip of whole rows of chunks.
    columns, height, width = shape
    across, strip = columns // width, columns * height
    step, buffers = max(1, _STRIP // strip), _buffers(out, a, b)
    for row in range(first // across, last // across, step):
        below = min(row + step, last // across)
        for i in range(row * strip, min(below * strip, out.size)):
            out[i] = decay * residual[i] + scale * gradient[i]
        _topk(out, shape, plain, a, b, row * across, below * across, positions, values, buffers)


@compiled
def _topk(x, shape, plain, a, b, first, last, positions, values, buffers):
    columns, height, width = shape
    chunk, half, z = buffers
    across, size, bar = columns // width, height * width, np.int64(0)
    hits = np.empty(-(-size // simd.BLOCK), np.uint64)
    for number in range(first, last):
        origin = number // across * height * columns + number % across * width
        if plain:
            _load(x, origin, shape, z, width)
        else:
            _load(x, origin, shape, chunk, b.shape[1])
            _transform(chunk, height, width, a, b, half, z)
        z[size : hits.size * simd.BLOCK] = 0
        bar = _find(z, positions.shape[1], bar, hits)
        _take(z, hits, positions[number], values[number])


@compiled
def _buffers(x, a, b):
    numel = a.shape[1] * b.shape[1]
    return vectors.buffer(x, numel), vectors.buffer(x, numel), vectors.buffer(x, numel)


@compiled
def _load(x, origin, shape, chunk, stride):
    # Rows of a whole stride may be read beyond the width, but not beyond the tensor.
    columns, height, width = shape
    lanes = vectors.BYTES // x.itemsize
    for i in range(height):
        at, to = origin + i * columns, i * stride
        if stride % lanes == 0 and at + stride <= x.size:
            for j in range(0, stride, lanes):
                vectors.copy(chunk, to + j, x, at + j)
        else:
            for j in range(width):
                chunk[to + j] = x[at + j] if at + j < x.size else 0


@compiled
def _transform(chunk, height, width, a, b, half, z):
    # A·X into `half`, then times Bᵀ into z, where row follows row: what a row writes too much, the next one overwrites.
    stride, lanes, together = b.shape[1], vectors.BYTES // chunk.itemsize, vectors.TOGETHER
    if height == 1:
        for j in range(0, stride, lanes):
            vectors.weigh_one(z, j, 0, chunk, 0, 0, 1, b, j, stride, chunk, width)
        return
    for r in range(0, height, together):
        for j in range(0, stride, lanes):
            vectors.weigh(half, r * stride + j, stride, a, r, 1, a.shape[1], chunk, j, stride, chunk, height)
    for r in range(0, height, together):
        for j in range(stride - lanes, -1, -lanes):  # backwards, as only a row's last vector writes too much
            vectors.weigh(z, r * width + j, width, half, r * stride, stride, 1, b, j, stride, chunk, width)


@compiled
def _find(z, k, bar, hits):
    # Sets the k largest magnitudes' bits in `hits`, and returns a bar near the k-th, as an integer. The search begins
    # at the last chunk's bar, and doubles its steps until it has the k-th magnitude between two bars.
    low, high = np.int64(0), np.int64(_MOST_32 if z.itemsize == 4 else _MOST_64)
    most, step = high, np.int64(1) << (20 if z.itemsize == 4 else 49)  # an eighth of an octave
    while high - low > 1:
        count = _reach(z, bar, hits)
        if count == k:
            return bar
        if count > k:
            low = bar
            bar = bar + step if bar + step < high and high == most else low + (high - low) // 2
        else:
            high = bar
            bar = bar - step if bar - step > low and low == 0 else low + (high - low) // 2
        step = min(2 * step, np.int64(1) << 60)
    _add_ties(z, low, k - _reach(z, low + 1, hits), hits)
    return low


@compiled
def _reach(z, bar, hits):
    count = np.int64(0)
    for i in range(hits.size):
        hits[i] = simd.reaching(z, i * simd.BLOCK, bar)
        count += simd.ones(hits[i])
    return count


@compiled
def _add_ties(z, bar, missing, hits):
    # The first of those that are as large as the bar.
    for i in range(hits.size):
        tied = simd.reaching(z, i * simd.BLOCK, bar) & ~hits[i]
        while tied and missing:
            hits[i] |= tied & ~(tied - np.uint64(1))
            tied &= tied - np.uint64(1)
            missing -= 1


@compiled
def _take(z, hits, positions, values):
    place = 0
    for block in range(hits.size):
        rest = hits[block]
        while rest:
            i = block * simd.BLOCK + np.int64(simd.lowest(rest))
            rest &= rest - np.uint64(1)
            positions[place], values[place] = i, z[i]
            place += 1

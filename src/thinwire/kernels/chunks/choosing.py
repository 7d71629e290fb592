"""The transform of every chunk, and its largest coefficients.

Buffers have rows of whole vectors of 64 bytes. Lanes beyond the chunk's width hold anything, and so do rows that fill
up a group. A `shape` is the tensor's columns, and a chunk's height and width.
"""

import numpy as np

from thinwire.kernels import simd
from thinwire.kernels.accumulate.cpu import sum_at
from thinwire.kernels.chunks import square, vectors
from thinwire.kernels.compiled import compiled, vector

_TOGETHER = 1024
"""How many chunks are accumulated before they are transformed: they are still in the cache."""
PLAIN, DENSE, FOLDED, SQUARE = range(4)
"""How a chunk is transformed: not at all, by any matrices, a DCT by columns, or a whole one of side 16."""
FEW = simd.FEW
_FEWER, _AT_ONCE = FEW - 4, 4
"""A chunk's largest are first looked for among at most `FEW` coefficients, where no more than `_FEWER` are wanted."""
_MOST_32, _MOST_64 = np.iinfo(np.int32).max, np.iinfo(np.int64).max


@compiled
def topk_each(places, size, like, factors, shape, how, a, b, first, last, positions, values):
    # The largest coefficients of chunks `first` to `last` of each of several vectors of one size, which begin at these
    # addresses. With scales and decays, of sums: a row of places has the addresses of out, residual and gradient.
    buffers = _buffers(like, shape, a, b)
    for i in range(len(places)):
        x, found = vector(places[i, 0], size, like), (positions[i], values[i])
        if factors is None:
            _topk(x, shape, how, a, b, first, last, found[0], found[1], buffers, np.int64(0))
        else:
            residual, gradient = vector(places[i, 1], size, like), vector(places[i, 2], size, like)
            scale, decay = factors[0][i], factors[1][i]
            _sum_topk(x, residual, gradient, (scale, decay), shape, how, a, b, first, last, found[0], found[1], buffers)


@compiled
def _sum_topk(out, residual, gradient, factors, shape, how, a, b, first, last, positions, values, buffers):
    # Some chunks at a time, from whole rows of chunks.
    columns, height, width = shape
    across, bar = columns // width, np.int64(0)
    down = max(1, _TOGETHER // across)
    for row in range(first // across, last // across, down):
        below = min(row + down, last // across)
        for left in range(0, across, _TOGETHER):
            right = min(left + _TOGETHER, across)
            for i in range(row * height, below * height):
                begin, end = i * columns + left * width, i * columns + right * width
                _add(out, residual, gradient, factors[0], factors[1], begin, end)
            begin, end = row * across + left, (below - 1) * across + right
            bar = _topk(out, shape, how, a, b, begin, end, positions, values, buffers, bar)


@compiled
def _add(out, residual, gradient, scale, decay, first, last):
    # In whole vectors. The last may begin earlier or end later: what is written twice is the same.
    lanes = vectors.BYTES // out.itemsize
    if out.size < lanes:
        for i in range(out.size):
            out[i] = sum_at(residual, gradient, i, scale, decay, None, None, None)
        return
    for at in range(first, min(last, out.size), lanes):
        vectors.add_up(out, min(at, out.size - lanes), residual, gradient, scale, decay)


@compiled
def _buffers(x, shape, a, b):
    numel, apart = a.shape[1] * b.shape[1], -(-b.shape[1] // simd.BLOCK) * simd.BLOCK
    rows = vectors.TOGETHER if shape[1] == 1 else 0
    hits, near = np.empty(numel // simd.BLOCK + 1, np.uint64), np.zeros(FEW + _AT_ONCE, np.int64)
    return (
        vectors.buffer(x, numel),
        vectors.buffer(x, numel),
        vectors.buffer(x, numel),
        hits,
        near,
        vectors.buffer(x, FEW),
        vectors.buffer(x, rows * shape[2]),
        vectors.buffer(x, rows * apart),
    )


@compiled
def _topk(x, shape, how, a, b, first, last, positions, values, buffers, bar):
    columns, height, width = shape
    chunk, half, alone, room, near, some, given, together = buffers
    across, size, k = columns // width, height * width, positions.shape[1]
    hits, octave = room[: -(-size // simd.BLOCK)], 23 if alone.itemsize == 4 else 52
    most = np.int64(_MOST_32 if alone.itemsize == 4 else _MOST_64)
    in_rows, apart = height == 1 and how != PLAIN, together.size // vectors.TOGETHER // simd.BLOCK * simd.BLOCK
    z = alone
    for number in range(first, last):
        if in_rows:
            row = (number - first) % vectors.TOGETHER
            if row == 0:
                _transform_rows(x, number * width, width, b, given, together, apart)
            z = together[row * apart : (row + 1) * apart]
        else:
            origin = number // across * height * columns + number % across * width
            _spread(x, origin, shape, how, a, b, chunk, half, z)
        for i in range(size, hits.size * simd.BLOCK):
            z[i] = 0
        count = _reach(z, bar, hits) if k <= _FEWER else 0
        if k <= count <= FEW:
            _take_best(z, hits, near, some, count, positions, values, number)
            bar += min((count - (k + FEW) // 2) << (octave - 9), most - bar)
        else:
            bar = _find(z, k, bar, hits)
            _take(z, hits, positions, values, number)
            if k <= _FEWER:
                bar = max(np.int64(0), bar - (np.int64(1) << (octave - 3)))
    return bar


@compiled
def _transform_rows(x, at, width, b, given, out, apart):
    # Some chunks of one row, which share what they load, each `apart` from the one before. The tensor may end earlier.
    if at + vectors.TOGETHER * width > x.size:
        for i in range(vectors.TOGETHER * width):
            given[i] = x[at + i] if at + i < x.size else 0
        x, at = given, np.int64(0)
    for j in range(0, b.shape[1], vectors.BYTES // x.itemsize):
        vectors.weigh(out, j, apart, x, at, width, 1, b, j, b.shape[1], x, width)


@compiled
def _spread(x, origin, shape, how, a, b, chunk, half, z):
    # The chunk's coefficients.
    columns, height, width = shape
    inside = origin + (height - 1) * columns + b.shape[1] <= x.size
    if how == PLAIN and inside and width == b.shape[1]:
        _copy(x, origin, shape, z)
    elif how == PLAIN:
        _load(x, origin, shape, z, width)
    elif not inside:
        _load(x, origin, shape, z, b.shape[1])
        _transform(z, np.int64(0), np.int64(b.shape[1]), height, width, how, a, b, chunk, half, z)
    else:
        _transform(x, origin, columns, height, width, how, a, b, chunk, half, z)


@compiled
def _take_best(z, hits, near, some, count, positions, values, number):
    # The largest of a few hits, most of which are found without a branch to guess.
    at = np.int64(0)
    for block in range(hits.size):
        rest = hits[block]
        for _ in range(_AT_ONCE):
            near[at] = block * simd.BLOCK + np.int64(simd.lowest(rest))
            at += rest != 0
            rest &= rest - np.uint64(1)
        while rest:
            near[at] = block * simd.BLOCK + np.int64(simd.lowest(rest))
            at += 1
            rest &= rest - np.uint64(1)
    for i in range(FEW):
        some[i] = z[near[i]]
    best = simd.leading(some, count, positions.shape[1])
    for place in range(positions.shape[1]):
        i = near[np.int64(simd.lowest(best))]
        best &= best - np.uint64(1)
        positions[number, place], values[number, place] = i, z[i]


@compiled
def _copy(x, origin, shape, z):
    # In whole vectors.
    columns, height, width = shape
    for i in range(height):
        for j in range(0, width, vectors.BYTES // x.itemsize):
            vectors.copy(z, i * width + j, x, origin + i * columns + j)


@compiled
def _load(x, origin, shape, chunk, stride):
    # As far as the tensor reaches.
    columns, height, width = shape
    for i in range(height):
        at, to = origin + i * columns, i * stride
        for j in range(width):
            chunk[to + j] = x[at + j] if at + j < x.size else 0


@compiled
def _transform(x, at, apart, height, width, how, a, b, chunk, half, z):
    # Times A into `half`, then times Bᵀ into z, where row follows row: what a row writes too much, the next overwrites.
    stride, lanes, together = b.shape[1], vectors.BYTES // x.itemsize, vectors.TOGETHER
    if how == SQUARE:
        square.transform(z, x, at, apart)
        return
    if how == FOLDED:
        _folded(x, at, apart, height, a, chunk, half, stride)
    else:
        for r in range(0, height, together):
            for j in range(0, stride, lanes):
                vectors.weigh(half, r * stride + j, stride, a, r, 1, a.shape[1], x, at + j, apart, x, height)
    for r in range(0, height, together):
        for j in range(stride - lanes, -1, -lanes):  # backwards, as only a row's last vector writes too much
            vectors.weigh(z, r * width + j, width, half, r * stride, stride, 1, b, j, stride, half, width)


@compiled
def _folded(x, at, apart, height, a, chunk, half, stride):
    # Rows of a DCT read the same backwards, the odd ones with the other sign. So even rows weigh the sums of first and
    # last, and odd rows the differences: half the products.
    lanes, together, odd = vectors.BYTES // x.itemsize, vectors.TOGETHER, a.shape[0] * stride
    for i in range(height // 2):
        last = at + (height - 1 - i) * apart
        for j in range(0, stride, lanes):
            vectors.fold(chunk, i * stride + j, odd + i * stride + j, x, at + i * apart + j, last + j)
    if height % 2:
        for j in range(0, stride, lanes):
            vectors.copy(chunk, height // 2 * stride + j, x, at + height // 2 * apart + j)
    for r in range(0, a.shape[1] // 2, together):
        for j in range(0, stride, lanes):
            to, pitch, odds = 2 * r * stride + j, 2 * stride, a.shape[1] // 2 + r
            vectors.weigh(half, to, pitch, a, r, 1, a.shape[1], chunk, j, stride, x, a.shape[0])
            vectors.weigh(half, to + stride, pitch, a, odds, 1, a.shape[1], chunk, odd + j, stride, x, height // 2)


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
    missing = k - _reach(z, low + 1, hits)
    if missing < 0:  # no bar is above a NaN of all ones
        hits[:], missing, low = 0, k, high
    _add_ties(z, low, missing, hits)
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
def _take(z, hits, positions, values, number):
    place = 0
    for block in range(hits.size):
        rest = hits[block]
        while rest:
            i = block * simd.BLOCK + np.int64(simd.lowest(rest))
            rest &= rest - np.uint64(1)
            positions[number, place], values[number, place] = i, z[i]
            place += 1

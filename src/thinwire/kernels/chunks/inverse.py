"""The inverse transform of a few coefficients of every chunk: every product and sum is rounded on its own."""

import numpy as np

from thinwire.kernels import simd
from thinwire.kernels.chunks import vectors
from thinwire.kernels.compiled import exactly
from thinwire.kernels.several import vector


@exactly
def put_each(places, size, positions, values, start, shape, kept, plain, a, b, row_of, chunks, first, last, less):
    # Chunks `first` to `last` of each of several vectors of one size, which have so many. The coefficients of the first
    # vector are from `start` on.
    for i in range(len(places)):
        out, begin = vector(places[i, 0], size, values), start + i * chunks * kept
        _put_chunks(out, positions, values, begin, shape, kept, plain, a, b, row_of, first, last, less)


@exactly
def _put_chunks(out, positions, values, begin, shape, kept, plain, a, b, row_of, first, last, less):
    # Chunks `first` to `last`: written to `out`, or subtracted. Coefficients are added up: a row of `positions` and
    # `values` for each rank, in which those of chunk 0 are at `begin`.
    columns, height, width = shape
    across, stride = columns // width, b.shape[1]
    half, block = vectors.buffer(values, a.shape[1] * stride), vectors.buffer(values, a.shape[1] * stride)
    rows = np.empty(height, np.int64)
    for number in range(first, last):
        origin = number // across * height * columns + number % across * width
        if plain:
            block[: height * width] = 0
            for rank in range(positions.shape[0]):
                for i in range(begin + number * kept, begin + (number + 1) * kept):
                    block[positions[rank, i]] += values[rank, i]
            _put(out, origin, columns, height, width, block, width, less)
        else:
            start, stop = begin + number * kept, begin + (number + 1) * kept
            count = _rows(positions, values, start, stop, row_of, width, b, half, rows)
            _columns(out, origin, columns, height, width, a, half, stride, rows, count, block, less)


@exactly
def _rows(positions, values, start, stop, row_of, width, b, half, rows):
    # Each row of coefficients that is not empty, times B; lists these rows, ascending, and returns how many there are.
    seen, stride, lanes = np.uint64(0), b.shape[1], vectors.BYTES // b.itemsize
    for rank in range(positions.shape[0]):
        for i in range(start, stop):
            at, value = np.int64(positions[rank, i]), values[rank, i]
            row = row_of[at]
            begin, here = (at - row * width) * stride, np.uint64(1) << np.uint64(row)
            for j in range(0, stride, lanes):
                if seen & here:
                    vectors.add(half, row * stride + j, value, b, begin + j)
                else:
                    vectors.times(half, row * stride + j, value, b, begin + j)
            seen |= here
    count = 0
    while seen:
        rows[count] = np.int64(simd.lowest(seen))
        seen &= seen - np.uint64(1)
        count += 1
    return count


@exactly
def _columns(out, origin, columns, height, width, a, half, stride, rows, count, block, less):
    # Aᵀ times what `_rows` left, written to `out` or subtracted: straight away where rows are whole vectors.
    lanes, together, pitch = vectors.BYTES // half.itemsize, vectors.TOGETHER, a.shape[1]
    for i in range(0, height, together):
        at = origin + i * columns
        if stride == width and i + together <= height and at + (together - 1) * columns + width <= out.size:
            for j in range(0, stride, lanes):
                if less:
                    vectors.subtract_listed(out, at + j, columns, a, i, 1, pitch, half, j, stride, rows, count)
                else:
                    vectors.weigh_listed(out, at + j, columns, a, i, 1, pitch, half, j, stride, rows, count)
        else:
            for j in range(0, stride, lanes):
                vectors.weigh_listed(block, j, stride, a, i, 1, pitch, half, j, stride, rows, count)
            _put(out, at, columns, min(together, height - i), width, block, stride, less)


@exactly
def _put(out, at, columns, height, width, block, stride, less):
    # A block's rows, as far as the tensor reaches.
    for i in range(height):
        begin = at + i * columns
        for j in range(min(width, out.size - begin)):
            value = block[i * stride + j]
            out[begin + j] = out[begin + j] - value if less else value

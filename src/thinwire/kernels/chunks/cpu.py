"""The largest coefficients of every chunk: one pass, chunk by chunk in the cache. Inverse transforms likewise.

A chunk lies in a buffer whose rows are whole vectors of 64 bytes. Lanes beyond the chunk's width hold anything, and so
do rows that fill up a group.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinwire.kernels import simd
from thinwire.kernels.chunks import vectors
from thinwire.kernels.chunks.chunking import Chunking
from thinwire.kernels.compiled import compiled, exactly
from thinwire.kernels.memory import empty
from thinwire.kernels.ranges import map_ranges
from thinwire.kernels.select.cpu import as_integers

Array = np.ndarray[Any, Any]


def chunk_topk(x: Tensor, chunking: Chunking) -> tuple[Tensor, Tensor]:
    """See `reference.chunk_topk`."""
    positions, values = empty(chunking.count, torch.int16, x.device), empty(chunking.count, x.dtype, x.device)
    a, b = chunking.axes(x)
    rows, columns = _padded(a.T, vectors.TOGETHER), _padded(b.T, vectors.BYTES // b.element_size())
    shape = chunking.columns, chunking.height, chunking.width, chunking.transform is None

    def run(lo: int, hi: int) -> None:
        first, last = lo // chunking.size, hi // chunking.size
        chunk, half, z, magnitudes = _room(x, *(rows.shape[1] * columns.shape[1] + simd.BLOCK,) * 4)
        bits, sign = as_integers(z)
        out = (part[first * chunking.kept : last * chunking.kept].numpy() for part in (positions, values))
        buffers = chunk.numpy(), half.numpy(), z.numpy(), bits, as_integers(magnitudes)[0]
        _topk_loop(x.numpy(), *shape, rows, columns, *buffers, sign, chunking.kept, first, last, *out)

    map_ranges(run, chunking.chunks * chunking.size, align=chunking.size)
    return positions, values


def chunk_write(out: Tensor, positions: Tensor, values: Tensor, chunking: Chunking) -> None:
    """See `reference.chunk_write`: the same bits."""
    _inverse(out, positions, values, chunking, subtract=False)


def chunk_subtract(out: Tensor, positions: Tensor, values: Tensor, chunking: Chunking) -> None:
    """See `reference.chunk_subtract`: the same bits."""
    _inverse(out, positions, values, chunking, subtract=True)


def _inverse(out: Tensor, positions: Tensor, values: Tensor, chunking: Chunking, *, subtract: bool) -> None:
    a, b = chunking.axes(values)
    rows, columns = _padded(a, vectors.TOGETHER), _padded(b, vectors.BYTES // b.element_size())
    ranks = values.numel() // max(1, chunking.count), chunking.chunks * chunking.kept
    places, coefficients = positions.numpy().reshape(ranks), values.numpy().reshape(ranks)
    shape = chunking.columns, chunking.height, chunking.width, chunking.kept, chunking.transform is None
    row_of = np.arange(chunking.size) // chunking.width

    def run(lo: int, hi: int) -> None:
        half, block = _room(values, *(rows.shape[1] * columns.shape[1] + simd.BLOCK,) * 2)
        arguments = *shape, rows, columns, row_of, half.numpy(), block.numpy(), np.empty(chunking.height, np.int64)
        _inverse_loop(out.numpy(), places, coefficients, *arguments, lo // chunking.size, hi // chunking.size, subtract)

    map_ranges(run, chunking.chunks * chunking.size, align=chunking.size)


def _padded(matrix: Tensor, multiple: int) -> Array:
    """Return a matrix with columns of zeros, up to a multiple."""
    padded = torch.nn.functional.pad(matrix, (0, -matrix.shape[1] % multiple)).contiguous()
    (room,) = _room(padded, padded.numel())
    return room.copy_(padded.view(-1)).view(padded.shape).numpy()


def _room(like: Tensor, *sizes: int) -> list[Tensor]:
    """Return zeros of the dtype of `like` that begin at a cache line, so that no vector lies in two."""
    each = [like.new_zeros(size + vectors.BYTES) for size in sizes]
    starts = [-part.data_ptr() % vectors.BYTES // part.element_size() for part in each]
    return [part[start : start + size] for part, start, size in zip(each, starts, sizes, strict=True)]


@compiled
def _topk_loop(
    x,
    columns,
    height,
    width,
    plain,
    a,
    b,
    chunk,
    half,
    z,
    bits,
    magnitudes,
    sign,
    kept,
    first,
    last,
    positions,
    values,
):
    # Chunks `first` to `last`. z holds a chunk's coefficients, and `bits` are their bits.
    across, size, place, bar = columns // width, height * width, 0, np.int64(0)
    masks = np.empty(-(-size // simd.BLOCK), np.uint64)
    for number in range(first, last):
        origin = number // across * height * columns + number % across * width
        if plain:
            _load(x, origin, columns, height, width, z, width)
        else:
            _load(x, origin, columns, height, width, chunk, b.shape[1])
            _transform(chunk, height, width, a, b, half, z)
        for i in range(size, masks.size * simd.BLOCK):
            z[i] = 0
        for i in range(masks.size * simd.BLOCK):
            magnitudes[i] = bits[i] & sign
        bar, ties = _kth(magnitudes, size, sign, kept, bar, masks)
        _take(z, magnitudes, masks, size, type(sign)(bar), ties, positions[place:], values[place:], kept)
        place += kept


@compiled
def _load(x, origin, columns, height, width, chunk, stride):
    # Rows of a whole stride may be read beyond the width, but not beyond the tensor.
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
def _kth(magnitudes, size, sign, k, bar, masks):
    # A bar that k magnitudes reach, and how many of its equals count; `masks` say which reach it. The search begins at
    # the last chunk's bar, and doubles its steps until it has the k-th magnitude between two bars.
    low, high = np.int64(0), np.int64(sign)
    step = np.int64(1) << (20 if magnitudes.itemsize == 4 else 49)  # an eighth of an octave
    while high - low > 1:
        reached = _reach(magnitudes, type(sign)(bar), masks)
        if reached == k:
            return bar, k
        if reached > k:
            low = bar
            bar = bar + step if bar + step < high and high == sign else low + (high - low) // 2
        else:
            high = bar
            bar = bar - step if bar - step > low and low == 0 else low + (high - low) // 2
        step = min(2 * step, np.int64(1) << 60)
    above = _reach(magnitudes, type(sign)(low + 1), masks)
    _reach(magnitudes, type(sign)(low), masks)
    return low, k - above


@compiled
def _reach(magnitudes, bar, masks):
    count = np.int64(0)
    for i in range(masks.size):
        masks[i] = simd.reaching(magnitudes, i * simd.BLOCK, bar)
        count += simd.ones(masks[i])
    return count


@compiled
def _take(z, magnitudes, masks, size, bar, ties, positions, values, k):
    # What lies above the bar, and the first `ties` that equal it.
    place = 0
    for block in range(masks.size):
        hits = masks[block]
        while hits and place < k:
            i = block * simd.BLOCK + np.int64(simd.lowest(hits))
            hits &= hits - np.uint64(1)
            above = magnitudes[i] > bar
            if i < size and (above or ties > 0):
                ties -= not above
                positions[place], values[place] = i, z[i]
                place += 1


@exactly
def _inverse_loop(
    out,
    positions,
    values,
    columns,
    height,
    width,
    kept,
    plain,
    a,
    b,
    row_of,
    half,
    block,
    rows,
    first,
    last,
    less,
):
    across, stride = columns // width, b.shape[1]
    for number in range(first, last):
        origin = number // across * height * columns + number % across * width
        if plain:
            for i in range(height * width):
                block[i] = 0
            for rank in range(positions.shape[0]):
                for i in range(number * kept, (number + 1) * kept):
                    block[positions[rank, i]] += values[rank, i]
            _put(out, origin, columns, height, width, block, width, less)
        else:
            count = _rows(positions, values, number * kept, (number + 1) * kept, row_of, width, b, half, rows)
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

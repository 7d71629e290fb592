"""The largest coefficients of every chunk: one pass, chunk by chunk in the cache. Inverse transforms likewise.

A chunk lies in a buffer whose rows are whole vectors of 64 bytes. Lanes beyond the chunk's width hold anything.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinwire.kernels import simd
from thinwire.kernels.chunks import vectors
from thinwire.kernels.chunks.chunking import Chunking, binomials
from thinwire.kernels.compiled import compiled, exactly
from thinwire.kernels.memory import empty
from thinwire.kernels.ranges import map_ranges
from thinwire.kernels.select.cpu import as_integers

Array = np.ndarray[Any, Any]
_WORD = 64


def chunk_topk(x: Tensor, chunking: Chunking) -> tuple[Tensor, Tensor]:
    """See `reference.chunk_topk`."""
    positions, values = empty(chunking.count, torch.int16, x.device), empty(chunking.count, x.dtype, x.device)
    a, b = chunking.axes(x)
    rows, columns, kept = a.numpy(), _padded(b.T), chunking.kept
    places, found, plain = positions.numpy(), values.numpy(), chunking.transform is None

    def run(lo: int, hi: int) -> None:
        wide, size = chunking.height * columns.shape[1], chunking.size
        room = [x.new_zeros(n) for n in (wide, wide, size + max(columns.shape[1], -size % simd.BLOCK))]
        bits, sign = as_integers(room[2])
        buffers = [each.numpy() for each in room]
        first, last = lo // chunking.size, hi // chunking.size
        out = places[first * kept : last * kept], found[first * kept : last * kept]
        shape = chunking.columns, chunking.height, chunking.width
        _topk_loop(
            x.numpy(), *shape, rows, columns, plain, *buffers, bits, sign, np.zeros_like(bits), kept, first, last, *out
        )

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
    rows, columns, plain = a.numpy(), _padded(b), chunking.transform is None
    shape = values.numel() // max(1, chunking.count), chunking.chunks, chunking.kept
    places, coefficients = positions.numpy().reshape(shape), values.numpy().reshape(shape)
    row_of = np.arange(chunking.size) // chunking.width

    def run(lo: int, hi: int) -> None:
        z = np.zeros(chunking.size + columns.shape[1], rows.dtype)
        work = [np.zeros((chunking.height, n), rows.dtype) for n in (columns.shape[1], chunking.height)]
        shape = chunking.columns, chunking.height, chunking.width
        line, touched = np.zeros(columns.shape[1], rows.dtype), np.zeros(chunking.height, np.bool_)
        arguments = (*shape, rows, columns, plain, row_of, z, touched, *work, line)
        _inverse_loop(out.numpy(), places, coefficients, *arguments, lo // chunking.size, hi // chunking.size, subtract)

    map_ranges(run, chunking.chunks * chunking.size, align=chunking.size)


def subsets_encode(positions: Tensor, chunking: Chunking) -> Tensor:
    """See `reference.subsets_encode`."""
    bits = chunking.bits or 0
    nbytes = -(-chunking.chunks * bits // 8)
    words = np.zeros(nbytes // 8 + 2, np.dtype("<u8"))
    table, places = binomials(chunking.size, chunking.kept).numpy(), positions.numpy()

    def run(lo: int, hi: int) -> None:
        _number_loop(places, table, bits, lo // chunking.size, hi // chunking.size, words)

    map_ranges(run, chunking.chunks * chunking.size, align=_WORD * chunking.size)
    return torch.from_numpy(words.view(np.uint8)[:nbytes])


def subsets_decode(rows: Tensor, chunking: Chunking) -> Tensor:
    """See `reference.subsets_decode`."""
    bits, table = chunking.bits or 0, binomials(chunking.size, chunking.kept).numpy()
    words = np.zeros((rows.shape[0], rows.shape[1] // 8 + 2), np.dtype("<u8"))
    words.view(np.uint8)[:, : rows.shape[1]] = rows.numpy()
    positions = np.empty((rows.shape[0], chunking.count), np.int16)
    for row, out in zip(words, positions, strict=True):

        def run(lo: int, hi: int, row: Array = row, out: Array = out) -> bool:
            first, last = lo // chunking.size, hi // chunking.size
            return bool(_subset_loop(row, table, bits, np.uint64(chunking.subsets), first, last, out))

        good = map_ranges(run, chunking.chunks * chunking.size, align=chunking.size)
        used = chunking.chunks * bits
        if not all(good) or row[used // 64] >> np.uint64(used % 64) or row[used // 64 + 1 :].any():
            out.fill(-1)
    return torch.from_numpy(positions)


def _padded(matrix: Tensor) -> Array:
    """Return a matrix whose rows are whole vectors, filled up with zeros."""
    lanes = vectors.BYTES // matrix.element_size()
    return torch.nn.functional.pad(matrix, (0, -matrix.shape[1] % lanes)).contiguous().numpy()


@compiled
def _topk_loop(
    x, columns, height, width, a, b, plain, chunk, half, z, bits, sign, peaks, kept, first, last, positions, values
):
    # Chunks `first` to `last`. z holds a chunk's coefficients, and `bits` are their bits.
    across, size, place, below = columns // width, height * width, 0, 0
    room = size + -size % simd.BLOCK
    for number in range(first, last):
        origin = number // across * height * columns + number % across * width
        if plain:
            _load(x, origin, columns, height, width, z, width)
        else:
            _load(x, origin, columns, height, width, chunk, b.shape[1])
            _transform(chunk, height, width, a, b, half, z)
        for i in range(size, room):
            z[i] = 0
        bar, ties, below = _kth(bits[:size], sign, kept, below)
        _take(
            z,
            bits,
            peaks,
            sign,
            size,
            type(sign)(bar),
            ties,
            positions[place : place + kept],
            values[place : place + kept],
        )
        place += kept


@compiled
def _load(x, origin, columns, height, width, chunk, stride):
    # Rows of a whole stride may be read beyond the width, but not beyond the tensor.
    for i in range(height):
        at, to = origin + i * columns, i * stride
        if at + stride <= x.size:
            for j in range(stride):
                chunk[to + j] = x[at + j]
        else:
            for j in range(width):
                chunk[to + j] = x[at + j] if at + j < x.size else 0


@compiled
def _transform(chunk, height, width, a, b, half, z):
    # A·X into `half`, then times Bᵀ into z, where row follows row: what a row writes too much, the next one overwrites.
    stride, lanes = b.shape[1], vectors.BYTES // chunk.itemsize
    rows = chunk
    if height > 1:
        rows = half
        for r in range(height):
            for j in range(0, stride, lanes):
                vectors.weigh(half, r * stride + j, a, r * height, 1, chunk, j, stride, height)
    for r in range(height):
        for j in range(0, stride, lanes):
            vectors.weigh(z, r * width + j, rows, r * stride, 1, b, j, stride, width)


@compiled
def _kth(bits, sign, k, below):
    # A bar that k magnitudes reach, how many of its equals count, and how far it lies below the peak. The search begins
    # where the last chunk's bar was, and doubles its steps until it has the k-th magnitude between two bars.
    peak = type(sign)(0)
    for i in range(bits.size):
        peak = max(peak, bits[i] & sign)
    peak = min(np.int64(peak), np.int64(sign) - 1)
    low, high, step = np.int64(0), peak + 1, np.int64(1) << (20 if bits.itemsize == 4 else 49)  # an eighth of an octave
    bar = max(peak - below, low)
    while high - low > 1:
        reached = _reach(bits, sign, type(sign)(bar))
        if reached == k:
            return bar, k, peak - bar
        if reached > k:
            low = bar
            bar = bar + step if bar + step < high and high == peak + 1 else low + (high - low) // 2
        else:
            high = bar
            bar = bar - step if bar - step > low and low == 0 else low + (high - low) // 2
        step = min(2 * step, np.int64(1) << 60)
    return low, k - _reach(bits, sign, type(sign)(low + 1)), peak - low


@compiled
def _reach(bits, sign, bar):
    count = np.int32(0)
    for i in range(bits.size):
        count += np.int32((bits[i] & sign) >= bar)
    return count


@compiled
def _take(z, bits, peaks, sign, size, bar, ties, positions, values):
    # What lies above the bar, and the first `ties` that equal it.
    place = 0
    if bar == 0:
        for i in range(size):
            above = (bits[i] & sign) > 0
            if place < positions.size and (above or ties > 0):
                ties -= not above
                positions[place], values[place] = i, z[i]
                place += 1
        return
    for start in range(0, size, simd.BLOCK):
        hits = simd.look(bits, peaks, start, bar)
        while hits and place < positions.size:
            i = start + np.int64(simd.lowest(hits))
            hits &= hits - np.uint64(1)
            if (bits[i] & sign) > bar or ties > 0:
                ties -= (bits[i] & sign) == bar
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
    a,
    b,
    plain,
    row_of,
    z,
    touched,
    half,
    weights,
    line,
    first,
    last,
    less,
):
    across, stride = columns // width, b.shape[1]
    lanes = vectors.BYTES // b.itemsize
    for number in range(first, last):
        origin = number // across * height * columns + number % across * width
        for rank in range(positions.shape[0]):
            for i in range(positions.shape[2]):
                at = positions[rank, number, i]
                z[at] += values[rank, number, i]
                touched[row_of[at]] = True
        if plain:
            _put_plain(out, origin, columns, height, width, z, less)
        else:
            count = _rows(z, touched, width, a, b, half, weights)
            for i in range(height):
                _put(out, origin + i * columns, width, weights, i, half, count, line, less)
        for rank in range(positions.shape[0]):
            for i in range(positions.shape[2]):
                z[positions[rank, number, i]] = 0
                touched[row_of[positions[rank, number, i]]] = False


@exactly
def _rows(z, touched, width, a, b, half, weights):
    # Of each row of coefficients that is not empty: the row times B, and the row of A that weighs it.
    count, stride, lanes = 0, b.shape[1], vectors.BYTES // b.itemsize
    for r in range(touched.size):
        if touched[r]:
            for j in range(0, stride, lanes):
                vectors.weigh_exactly(half, count * stride + j, z, r * width, 1, b, j, stride, width)
            weights[count] = a[r]
            count += 1
    return count


@exactly
def _put(out, at, width, weights, i, half, count, line, less):
    # Row i of a chunk: written to `out`, or subtracted from it.
    height, stride, lanes = weights.shape[1], half.shape[1], vectors.BYTES // half.itemsize
    if stride == width and at + width <= out.size:
        for j in range(0, stride, lanes):
            if less:
                vectors.subtract(out, at + j, weights, i, height, half, j, stride, count)
            else:
                vectors.weigh_exactly(out, at + j, weights, i, height, half, j, stride, count)
        return
    for j in range(0, stride, lanes):
        vectors.weigh_exactly(line, j, weights, i, height, half, j, stride, count)
    for j in range(min(width, out.size - at)):
        out[at + j] = out[at + j] - line[j] if less else line[j]


@exactly
def _put_plain(out, origin, columns, height, width, z, less):
    for i in range(height):
        at = origin + i * columns
        for j in range(min(width, out.size - at)):
            out[at + j] = out[at + j] - z[i * width + j] if less else z[i * width + j]


@compiled
def _number_loop(positions, table, bits, first, last, words):
    kept = table.shape[0]
    for chunk in range(first, last):
        number = np.int64(0)
        for i in range(kept):
            number += table[i, positions[chunk * kept + i]]
        word, shift = chunk * bits >> 6, np.uint64(chunk * bits & 63)
        words[word] |= np.uint64(number) << shift
        if np.int64(shift) + bits > 64:
            words[word + 1] |= np.uint64(number) >> (np.uint64(64) - shift)


@compiled
def _subset_loop(words, table, bits, subsets, first, last, positions):
    # Returns False if a number belongs to no subset.
    kept, ones = table.shape[0], (np.uint64(1) << np.uint64(bits)) - np.uint64(1)
    for chunk in range(first, last):
        word, shift = chunk * bits >> 6, np.uint64(chunk * bits & 63)
        number = words[word] >> shift
        if np.int64(shift) + bits > 64:
            number |= words[word + 1] << (np.uint64(64) - shift)
        number &= ones
        if number >= subsets:
            return False
        rest, high = np.int64(number), table.shape[1]
        for i in range(kept - 1, -1, -1):
            high = _last_within(table, i, rest, high)
            rest -= table[i, high]
            positions[chunk * kept + i] = high
    return True


@compiled
def _last_within(table, i, number, high):
    # The largest p below `high` whose binomial is at most the number: positions descend.
    low = np.int64(0)
    while high - low > 1:
        middle = (low + high) // 2
        if table[i, middle] <= number:
            low = middle
        else:
            high = middle
    return low

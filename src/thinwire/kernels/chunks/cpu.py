"""The largest coefficients of every chunk, and their inverse transform: in one pass, chunk by chunk in the cache."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from thinwire.kernels import simd
from thinwire.kernels.accumulate.cpu import accumulate
from thinwire.kernels.chunks import choosing, square, vectors
from thinwire.kernels.chunks.chunking import Chunking
from thinwire.kernels.compiled import exactly, vector
from thinwire.kernels.memory import empty
from thinwire.kernels.parts import Array, Vectors, addresses, in_dtype, wide_each
from thinwire.kernels.ranges import is_single_threaded, map_ranges
from thinwire.kernels.sums import Sum


def chunk_topk(xs: Vectors, chunkings: Sequence[Chunking]) -> tuple[Tensor, Tensor]:
    return _topk((xs,), (None, None), chunkings)


def accumulate_chunk_topk(sums: Sum, chunkings: Sequence[Chunking]) -> tuple[Tensor, Tensor]:
    if sums.how not in ("sum", "fading"):
        accumulate(sums)
        return chunk_topk(wide_each(sums.outs), chunkings)
    columns = sums.outs, sums.residuals, in_dtype(sums.gradients, sums.dtype)
    return _topk(columns, sums.factors[:2], chunkings)


def _topk(
    columns: Sequence[Vectors], rates: Sequence[Array | None], chunkings: Sequence[Chunking]
) -> tuple[Tensor, Tensor]:
    """Choose among the first column; if there are scales, write the sums of the others to it first."""
    like, places, (scales, decays) = columns[0][0], addresses(*columns), rates
    count = sum([cut.count for cut in chunkings])
    positions, values = empty(count, torch.int16, like.device), empty(count, like.dtype, like.device)

    def run(some: slice, cut: Chunking, start: int, first: int, last: int) -> None:
        vectors = some.stop - some.start
        shape, end = (vectors, cut.chunks, cut.kept), start + vectors * cut.count
        rows = positions[start:end].numpy().reshape(shape), values[start:end].numpy().reshape(shape)
        given = None if scales is None else (scales[some], (np.ones_like(scales) if decays is None else decays)[some])
        forth, _ = _cut(cut, like.dtype)
        choosing.topk_each(places[some], cut.numel, like.numpy(), given, *forth, first, last, *rows)

    _run(run, chunkings, by_row=rates[0] is not None)
    return positions, values


def chunk_put(outs: Vectors, positions: Tensor, values: Tensor, chunkings: Sequence[Chunking], subtract: bool) -> None:
    places, chosen = addresses(outs), (positions.contiguous().numpy(), values.contiguous().numpy())

    def run(some: slice, cut: Chunking, start: int, first: int, last: int) -> None:
        _, back = _cut(cut, values.dtype)
        _put_each(places[some], cut.numel, *chosen, start, *back, cut.chunks, first, last, subtract)

    _run(run, chunkings)


def _run(
    run: Callable[[slice, Chunking, int, int, int], None], chunkings: Sequence[Chunking], *, by_row: bool = False
) -> None:
    """Call `run` with neighbours that are cut alike, how, where their coefficients begin, and its first and last chunk.

    A large vector is alone. Its chunks, or rows of them, are divided among threads.
    """
    for some, cut, start in _alike(tuple(chunkings)):
        if is_single_threaded(cut.numel):
            run(some, cut, start, 0, cut.chunks)
            continue
        for i in range(some.start, some.stop):
            begin = start + (i - some.start) * cut.count

            def part(lo: int, hi: int, i: int = i, begin: int = begin, cut: Chunking = cut) -> None:
                run(slice(i, i + 1), cut, begin, lo // cut.size, hi // cut.size)

            map_ranges(part, cut.chunks * cut.size, align=cut.size * (cut.across if by_row else 1))


@lru_cache(maxsize=256)
def _alike(chunkings: tuple[Chunking, ...]) -> Sequence[tuple[slice, Chunking, int]]:
    """Return which neighbours are cut alike, how, and where their coefficients begin."""
    found, first, start = [], 0, 0
    for cut, group in groupby(chunkings):
        some = slice(first, first + len(list(group)))
        found.append((some, cut, start))
        first, start = some.stop, start + (some.stop - some.start) * cut.count
    return found


@lru_cache(maxsize=1024)
def _cut(chunking: Chunking, dtype: torch.dtype) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return what the loops want to know: those that transform, and those that put back."""
    a, b = chunking.axes(torch.empty(0, dtype=dtype, device="cpu"))
    shape, lanes = (chunking.columns, chunking.height, chunking.width), vectors.BYTES // dtype.itemsize
    how = {None: choosing.PLAIN, "dct": choosing.FOLDED}.get(chunking.transform, choosing.DENSE)
    if (chunking.height, chunking.width, chunking.transform) == (square.SIDE, square.SIDE, "dct"):
        how = choosing.SQUARE
    down = _folded(a) if how == choosing.FOLDED else _padded(a.T, vectors.TOGETHER)
    up, across, back = (x.numpy() for x in (_padded(a, vectors.TOGETHER), _padded(b.T, lanes), _padded(b, lanes)))
    row_of = np.arange(chunking.size) // chunking.width
    inverse = (chunking.kept, how == choosing.PLAIN, up, back, row_of)
    return (shape, how, down.numpy(), across), (shape, *inverse)


def _folded(a: Tensor) -> Tensor:
    """Return what even rows of a DCT weigh sums with, and beside it what odd rows weigh differences with."""
    half = a[:, : -(-a.shape[0] // 2)].T
    evens, odds = (_padded(half[:, first::2], vectors.TOGETHER) for first in (0, 1))
    return torch.cat([evens, pad(odds, (0, evens.shape[1] - odds.shape[1]))], dim=1)


def _padded(matrix: Tensor, multiple: int) -> Tensor:
    """Return a matrix with columns of zeros, up to a multiple. It begins at a cache line, as all of torch's memory."""
    return pad(matrix, (0, -matrix.shape[1] % multiple)).contiguous()


# The inverse transform of a few coefficients of every chunk: every product and sum is rounded on its own.


@exactly
def _put_each(places, size, positions, values, start, shape, kept, plain, a, b, row_of, chunks, first, last, less):
    # Chunks `first` to `last` of each of several vectors of one size, which have so many: written, or subtracted.
    # Coefficients are added up: a row of `positions` and `values` for each rank, in which the first vector's are from
    # `start` on.
    columns, height, width = shape
    across, stride = columns // width, b.shape[1]
    half, block = vectors.buffer(values, a.shape[1] * stride), vectors.buffer(values, a.shape[1] * stride)
    rows = np.empty(height, np.int64)
    for at in range(len(places)):
        out = vector(places[at, 0], size, values)
        for number in range(first, last):
            origin = number // across * height * columns + number % across * width
            begin = start + (at * chunks + number) * kept
            if plain:
                block[: height * width] = 0
                for rank in range(positions.shape[0]):
                    for i in range(begin, begin + kept):
                        block[positions[rank, i]] += values[rank, i]
                _put(out, origin, columns, height, width, block, width, less)
            else:
                count = _rows(positions, values, begin, begin + kept, row_of, width, b, half, rows)
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

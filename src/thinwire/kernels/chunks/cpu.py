"""The largest coefficients of every chunk, and their inverse transform: in one pass, chunk by chunk in the cache."""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from thinwire.kernels.chunks import choosing, inverse, square, vectors
from thinwire.kernels.chunks.chunking import Chunking
from thinwire.kernels.memory import empty
from thinwire.kernels.parts import addresses, in_dtype
from thinwire.kernels.ranges import map_ranges

Array = np.ndarray[Any, Any]
_REALS: dict[torch.dtype, Any] = {torch.float32: np.float32, torch.float64: np.float64}


def chunk_topk(x: Tensor, chunking: Chunking) -> tuple[Tensor, Tensor]:
    """See `reference.chunk_topk`."""
    cut, source = _cut(chunking, x.dtype), x.numpy()
    positions, values, rows = _room_for(x, chunking)

    def run(lo: int, hi: int) -> None:
        choosing.topk(source, *cut.forth, lo // chunking.size, hi // chunking.size, *rows)

    map_ranges(run, chunking.chunks * chunking.size, align=chunking.size)
    return positions, values


def accumulate_fading_chunk_topk(
    out: Tensor, residual: Tensor, gradient: Tensor, scale: float, decay: float, chunking: Chunking
) -> tuple[Tensor, Tensor]:
    """See `reference.accumulate_fading_chunk_topk`."""
    cut, real = _cut(chunking, out.dtype), _REALS[out.dtype]
    given = *(t.numpy() for t in (out, residual, gradient.to(out.dtype).contiguous())), real(scale), real(decay)
    positions, values, rows = _room_for(out, chunking)

    def run(lo: int, hi: int) -> None:
        choosing.fading_topk(*given, *cut.forth, lo // chunking.size, hi // chunking.size, *rows)

    map_ranges(run, chunking.chunks * chunking.size, align=chunking.size * chunking.across)
    return positions, values


def chunk_topk_each(xs: Sequence[Tensor], chunkings: Sequence[Chunking]) -> tuple[Tensor, Tensor]:
    """See `reference.chunk_topk_each`."""
    places, like = addresses(xs), xs[0].numpy()
    positions, values = _room_for_all(xs[0], chunkings)
    for some, cut, rows in _runs(chunkings, positions, values):
        choosing.topk_each(places[some], cut.numel, like, *_cut(cut, xs[0].dtype).forth, cut.chunks, *rows)
    return positions, values


def accumulate_fading_chunk_topk_each(
    outs: Sequence[Tensor],
    residuals: Sequence[Tensor],
    gradients: Sequence[Tensor],
    scales: Sequence[float],
    decays: Sequence[float],
    chunkings: Sequence[Chunking],
) -> tuple[Tensor, Tensor]:
    """See `reference.accumulate_fading_chunk_topk_each`."""
    like, dtype = outs[0].numpy(), outs[0].dtype
    given, real = in_dtype(gradients, dtype), _REALS[dtype]
    places = addresses(outs, residuals, given)
    factors = np.array([scales, decays], real)
    positions, values = _room_for_all(outs[0], chunkings)
    for some, cut, rows in _runs(chunkings, positions, values):
        forth = _cut(cut, dtype).forth
        choosing.fading_topk_each(places[some], cut.numel, like, factors[:, some], *forth, cut.chunks, *rows)
    return positions, values


def chunk_put_each(
    outs: Sequence[Tensor], positions: Tensor, values: Tensor, chunkings: Sequence[Chunking], subtract: bool
) -> None:
    """See `reference.chunk_put_each`: the same bits."""
    places, chosen = addresses(outs), (positions.contiguous().numpy(), values.contiguous().numpy())
    for some, cut, start in _starts(tuple(chunkings)):
        back = _cut(cut, values.dtype).back
        inverse.put_each(places[some], cut.numel, *chosen, start, *back, cut.chunks, subtract)


def _room_for_all(x: Tensor, chunkings: Sequence[Chunking]) -> tuple[Tensor, Tensor]:
    count = sum(cut.count for cut in chunkings)
    return empty(count, torch.int16, x.device), empty(count, x.dtype, x.device)


@lru_cache(maxsize=256)
def _starts(chunkings: tuple[Chunking, ...]) -> Sequence[tuple[slice, Chunking, int]]:
    """Return which neighbours are cut alike, how, and where their coefficients begin."""
    found, first, start = [], 0, 0
    for cut, group in groupby(chunkings):
        some = slice(first, first + len(list(group)))
        found.append((some, cut, start))
        first, start = some.stop, start + (some.stop - some.start) * cut.count
    return found


def _runs(
    chunkings: Sequence[Chunking], positions: Tensor, values: Tensor
) -> Iterator[tuple[slice, Chunking, tuple[Array, Array]]]:
    """Yield which neighbours are cut alike, how, and their part of both as arrays (vectors, chunks, kept)."""
    for some, cut, start in _starts(tuple(chunkings)):
        shape = some.stop - some.start, cut.chunks, cut.kept
        end = start + shape[0] * cut.count
        yield some, cut, (positions[start:end].numpy().reshape(shape), values[start:end].numpy().reshape(shape))


def chunk_write(out: Tensor, positions: Tensor, values: Tensor, chunking: Chunking) -> None:
    """See `reference.chunk_write`: the same bits."""
    _inverse(out, positions, values, chunking, subtract=False)


def chunk_subtract(out: Tensor, positions: Tensor, values: Tensor, chunking: Chunking) -> None:
    """See `reference.chunk_subtract`: the same bits."""
    _inverse(out, positions, values, chunking, subtract=True)


def _inverse(out: Tensor, positions: Tensor, values: Tensor, chunking: Chunking, *, subtract: bool) -> None:
    cut, target = _cut(chunking, values.dtype), out.numpy()
    ranks = values.numel() // max(1, chunking.count), chunking.chunks * chunking.kept
    chosen = positions.numpy().reshape(ranks), values.numpy().reshape(ranks)

    def run(lo: int, hi: int) -> None:
        inverse.put(target, *chosen, 0, *cut.back, lo // chunking.size, hi // chunking.size, subtract)

    map_ranges(run, chunking.chunks * chunking.size, align=chunking.size)


def _room_for(x: Tensor, chunking: Chunking) -> tuple[Tensor, Tensor, tuple[Array, Array]]:
    """Return positions and values, uninitialised, and both as arrays with a row for each chunk."""
    positions, values = empty(chunking.count, torch.int16, x.device), empty(chunking.count, x.dtype, x.device)
    shape = chunking.chunks, chunking.kept
    return positions, values, (positions.numpy().reshape(shape), values.numpy().reshape(shape))


class _Cut(NamedTuple):
    """What the loops want to know of a `Chunking`."""

    forth: tuple[Any, ...]
    back: tuple[Any, ...]


@lru_cache(maxsize=1024)
def _cut(chunking: Chunking, dtype: torch.dtype) -> _Cut:
    a, b = chunking.axes(torch.empty(0, dtype=dtype))
    shape, lanes = (chunking.columns, chunking.height, chunking.width), vectors.BYTES // dtype.itemsize
    how = _how(chunking)
    down = _folded(a) if how == choosing.FOLDED else _padded(a.T, vectors.TOGETHER)
    row_of = np.arange(chunking.size) // chunking.width
    back = (chunking.kept, how == choosing.PLAIN, _padded(a, vectors.TOGETHER), _padded(b, lanes), row_of)
    return _Cut((shape, how, down, _padded(b.T, lanes)), (shape, *back))


def _how(chunking: Chunking) -> int:
    if (chunking.height, chunking.width, chunking.transform) == (square.SIDE, square.SIDE, "dct"):
        return choosing.SQUARE
    return {None: choosing.PLAIN, "dct": choosing.FOLDED}.get(chunking.transform, choosing.DENSE)


def _folded(a: Tensor) -> Array:
    """Return what even rows of a DCT weigh sums with, and beside it what odd rows weigh differences with."""
    half = a[:, : -(-a.shape[0] // 2)].T
    evens, odds = (_padded(half[:, first::2], vectors.TOGETHER) for first in (0, 1))
    both = torch.from_numpy(evens).new_zeros(half.shape[0], 2 * evens.shape[1])
    both[:, : evens.shape[1]] = torch.from_numpy(evens)
    both[:, evens.shape[1] : evens.shape[1] + odds.shape[1]] = torch.from_numpy(odds)
    return _padded(both, vectors.TOGETHER)


def _padded(matrix: Tensor, multiple: int) -> Array:
    """Return a matrix with columns of zeros, up to a multiple. It begins at a cache line: no vector lies in two."""
    rows, columns = matrix.shape[0], -(-matrix.shape[1] // multiple) * multiple
    room = matrix.new_zeros(rows * columns + vectors.BYTES)
    start = -room.data_ptr() % vectors.BYTES // room.element_size()
    padded = room[start : start + rows * columns].view(rows, columns)
    padded[:, : matrix.shape[1]] = matrix
    return padded.numpy()

"""Adding, overwriting and clearing elements by index."""

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any, final

import numpy as np
from torch import Tensor

from thinwire.kernels.cpu.ranges import map_ranges
from thinwire.kernels.cpu.select import BITS, STREAM_BYTES
from thinwire.kernels.loops import scatter as loops

_Array = np.ndarray[Any, Any]
_TILE, _GROUP = 1 << 13, 1 << 16
"""Elements summed at a time in the nearest cache, and in the next one where they have to be put in order first."""


def scatter_add(out: Tensor, indices: Tensor, values: Tensor, runs: Sequence[int], sign: float = 1.0) -> None:
    """See `reference.scatter_add`; one thread adds in order, so the runs need no heed."""
    real = BITS[out.dtype][0]
    loops.scatter_add(out.numpy(), indices.numpy(), values.to(out.dtype).numpy(), real(sign))


def scatter(
    out: Tensor, spans: Sequence[tuple[int, int]], indices: Tensor, values: Tensor, runs: Sequence[int]
) -> None:
    """See `reference.scatter`; everything is written once."""
    arrays = (indices.numpy(), values.to(out.dtype).numpy())
    starts, stops = _stretches(arrays[0], runs)
    ordered = loops.ascends(arrays[0], starts, stops)
    for offset, length in _joined(spans):
        part = out[offset : offset + length]
        stream = part.nbytes >= STREAM_BYTES and part.data_ptr() % 64 == 0
        write = _Writer(out.numpy(), offset, arrays, stream)
        map_ranges(partial(write.merged, starts, stops) if ordered else write.grouped, length, align=_GROUP)


def mask(x: Tensor, indices: Tensor, values: Tensor) -> None:
    """See `reference.mask`."""
    loops.mask(x.numpy(), indices.numpy(), values.to(x.dtype).numpy())


@final
class _Writer:
    """Writes ranges of `out`, counted from `offset`."""

    def __init__(self, out: _Array, offset: int, arrays: tuple[_Array, _Array], stream: bool) -> None:
        self._out, self._offset, self._arrays, self._stream = out, offset, arrays, stream

    def merged(self, starts: _Array, stops: _Array, lo: int, hi: int) -> None:
        """Write from stretches of ascending indices."""
        lo, hi, indices = lo + self._offset, hi + self._offset, self._arrays[0]
        ends = zip(starts, stops, strict=True)
        cursors = np.array([start + np.searchsorted(indices[start:stop], lo) for start, stop in ends])
        self._run(lo, hi, self._arrays, cursors, stops, _TILE)

    def grouped(self, lo: int, hi: int) -> None:
        """Write from indices in any order."""
        lo, hi = lo + self._offset, hi + self._offset
        arrays = tuple(map(np.empty_like, self._arrays))
        count = loops.group(*self._arrays, lo, hi, _GROUP, *arrays)
        self._run(lo, hi, arrays, np.zeros(1, np.int64), np.array([count]), _GROUP)

    def _run(self, lo: int, hi: int, arrays: tuple[_Array, ...], cursors: _Array, stops: _Array, width: int) -> None:
        tile = np.empty(max(1, min(width, hi - lo)), self._out.dtype)
        loops.scatter(self._out, lo, hi, *arrays, cursors, stops, tile, self._stream)


def _stretches(indices: _Array, runs: Sequence[int]) -> tuple[_Array, ...]:
    """Join runs that go on ascending where the one before ends: return where stretches start and stop."""
    edges = np.fromiter(accumulate(runs, initial=0), np.int64)
    inner = np.unique(edges[(edges > 0) & (edges < len(indices))])
    breaks = inner[indices[inner] < indices[inner - 1]]
    return np.concatenate([[0], breaks]), np.concatenate([breaks, [len(indices)]])


def _joined(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join spans that lie side by side."""
    joined: list[tuple[int, int]] = []
    for offset, length in sorted(spans):
        if joined and sum(joined[-1]) == offset:
            joined[-1] = (joined[-1][0], joined[-1][1] + length)
        else:
            joined.append((offset, length))
    return joined

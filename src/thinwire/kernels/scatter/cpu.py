"""Adding, overwriting and clearing elements by index, and adding sorted tables."""

from collections.abc import Sequence
from functools import partial
from itertools import accumulate

import numpy as np
from torch import Tensor

from thinwire.kernels import simd
from thinwire.kernels.compiled import compiled, vector
from thinwire.kernels.parts import REALS, Array, Ints, Regions, Vectors, begins, cut_at, sizes
from thinwire.kernels.places.reference import Checks
from thinwire.kernels.ranges import map_ranges
from thinwire.kernels.scatter import reference
from thinwire.kernels.select.cpu import streams

_TILE, _GROUP = 1 << 13, 1 << 16
"""Elements summed at a time: in the nearest cache, or in the next one if they have to be put in order first."""
_AHEAD = 16
"""How many elements ahead of the one being added a run is fetched."""


def scatter_add(
    outs: Vectors, offsets: Ints, indices: Tensor, values: Tensor, runs: Ints, sign: float = 1.0, masked: Vectors = ()
) -> None:
    dtype, edges = (outs or masked)[0].dtype, np.array([0, *accumulate(runs)], np.int64)
    given = values if values.dtype == dtype else values.to(dtype)
    arrays = np.array(offsets, np.int64), edges, indices.numpy(), given.numpy()
    if outs:
        _each_loop(begins(outs), sizes(outs), *arrays, REALS[dtype](sign))
    if masked:
        _each_loop(begins(masked), sizes(masked), *arrays, None)


def scatter(
    out: Tensor, regions: Regions, indices: Tensor, values: Tensor, runs: Ints, ascending: bool = False,
    checks: Checks | None = None, flags: Tensor | None = None,
) -> None:  # fmt: skip
    """See `reference.scatter`; everything is written once. Whether runs ascend is looked up, which costs little."""
    if checks is not None:  # the host looks at them before
        reference.scatter(out, regions, indices, values, runs, ascending, checks, flags)
        return
    whole, arrays = out.numpy(), (indices.numpy(), values.to(out.dtype).numpy())
    starts, stops = _stretches(arrays[0], runs)
    ordered = _ascend(arrays[0], starts, stops)

    def write(first: int, stream: bool | None, lo: int, hi: int) -> None:
        # Of a range that counts from `first`: from stretches of ascending indices, or after grouping them by tile.
        lo, hi, found, ends, width = lo + first, hi + first, arrays, stops, _TILE
        if ordered:
            edges = zip(starts, stops, strict=True)
            cursors = np.array([start + np.searchsorted(arrays[0][start:stop], lo) for start, stop in edges])
        else:
            found, cursors, width = (np.empty_like(arrays[0]), np.empty_like(arrays[1])), np.zeros(1, np.int64), _GROUP
            ends = np.array([_group_loop(*arrays, lo, hi, _GROUP, *found)])
        tile = np.empty(max(1, min(width, hi - lo)), whole.dtype)
        _scatter_loop(whole, lo, hi, *found, cursors, ends, tile, stream)

    for offset, length in cut_at(tuple(regions)).joined.regions:
        map_ranges(partial(write, offset, streams(out[offset : offset + length]) or None), length, align=_GROUP)


def _stretches(indices: Array, runs: Ints) -> tuple[Array, ...]:
    """Join each run to the one before if indices still ascend. Return where the joined stretches start and stop."""
    edges = np.fromiter(accumulate(runs, initial=0), np.int64)
    inner = np.unique(edges[(edges > 0) & (edges < len(indices))])
    breaks = inner[indices[inner] < indices[inner - 1]]
    return np.concatenate([[0], breaks]), np.concatenate([breaks, [len(indices)]])


def merge(keys: Sequence[Tensor], rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """See `reference.merge`; if all keys ascend already, tables are merged two at a time, as in merge sort."""
    if not all(bool((key[1:] >= key[:-1]).all()) for key in keys):
        return reference.merge(keys, rows)
    merged, out = keys[0][:0], rows[0][:0]
    for key, row in zip(keys, rows, strict=True):
        before, most = (merged, out), merged.numel() + key.numel()
        merged, out = key.new_empty(most), row.new_empty(most, row.shape[1])
        count = _merge_loop(*(x.numpy() for x in (merged, out, *before, key, row)))
        merged, out = merged[:count], out[:count]
    return merged, out


@compiled
def _each_loop(places, lengths, offsets, edges, indices, values, sign):
    # Adds values times the sign; where it is None, clears where one is not 0.
    for at in range(lengths.size):
        out, offset = vector(places[at], lengths[at], values), offsets[at]
        for run in range(at, edges.size - 1, lengths.size):
            for i in range(edges[run], edges[run + 1]):
                if sign is not None:
                    out[indices[i] - offset] += sign * values[i]
                elif values[i] != 0:
                    out[indices[i] - offset] = 0


@compiled
def _ascend(indices, starts, stops):
    falls = np.int64(0)  # counted to the end, in vectors
    for run in range(starts.size):
        stretch = indices[starts[run] : stops[run]]
        for i in range(1, stretch.size):
            falls += np.int64(stretch[i] < stretch[i - 1])
    return falls == 0


@compiled
def _scatter_loop(out, lo, hi, indices, values, cursors, stops, tile, stream):
    # Each tile is summed in the cache and written once, which takes as long as writing zeros, however many runs there
    # are. A cursor per run advances tile by tile. Within a tile, elements are added in their order.
    tile[:] = 0
    for base in range(lo, hi, tile.size):
        width, used = min(tile.size, hi - base), False
        for run in range(cursors.size):
            at = cursors[run]
            while at < stops[run] and indices[at] < base + width:
                tile[indices[at] - base] += values[at]
                at += 1
            # The processor cannot prefetch so many lists by itself.
            simd.prefetch(indices, at + _AHEAD)
            simd.prefetch(values, at + _AHEAD)
            used |= at > cursors[run]
            cursors[run] = at
        _write(out, base, width, tile, stream)
        if used:
            tile[:] = 0


@compiled
def _group_loop(indices, values, lo, hi, width, grouped_indices, grouped_values):
    # Groups the elements from lo to hi by tile, and keeps their order within each.
    places = np.zeros((hi - lo) // width + 2, np.int64)
    for i in range(indices.size):
        if lo <= indices[i] < hi:
            places[(indices[i] - lo) // width + 1] += 1
    for at in range(1, places.size):
        places[at] += places[at - 1]
    for i in range(indices.size):
        if lo <= indices[i] < hi:
            at = (indices[i] - lo) // width
            grouped_indices[places[at]], grouped_values[places[at]] = indices[i], values[i]
            places[at] += 1
    return places[-1]


@compiled
def _write(out, base, width, tile, stream):
    whole = width // simd.BLOCK * simd.BLOCK
    for near in range(0, whole, simd.BLOCK):
        simd.copy(tile, out, near, base + near, stream)
    for near in range(whole, width):
        out[base + near] = tile[near]


@compiled
def _merge_loop(keys, rows, keys_a, rows_a, keys_b, rows_b):
    a = b = count = 0
    while a < keys_a.size or b < keys_b.size:
        from_a = b == keys_b.size or (a < keys_a.size and keys_a[a] <= keys_b[b])
        key = keys_a[a] if from_a else keys_b[b]
        new = count == 0 or keys[count - 1] != key
        if new:
            keys[count] = key
            count += 1
        for j in range(rows.shape[1]):
            value = rows_a[a, j] if from_a else rows_b[b, j]
            rows[count - 1, j] = value if new else rows[count - 1, j] + value
        if from_a:
            a += 1
        else:
            b += 1
    return count

"""Adding, overwriting and clearing elements by index."""

import numpy as np

from thinwire.kernels.loops import lanes
from thinwire.kernels.loops.compiled import compiled

_AHEAD = 16


@compiled
def scatter_add(out, indices, values, sign):
    for i in range(indices.size):
        out[indices[i]] += sign * values[i]


@compiled
def ascends(indices, starts, stops):
    for run in range(starts.size):
        for i in range(starts[run] + 1, stops[run]):
            if indices[i] < indices[i - 1]:
                return False
    return True


@compiled
def scatter(out, lo, hi, indices, values, cursors, stops, tile, stream):
    # Summed in the cache and written once, so that it takes as long as writing zeros however many runs there are.
    # A run's elements are at its cursor tile by tile; their order within a tile is that of summation.
    tile[:] = 0
    for base in range(lo, hi, tile.size):
        width, used = min(tile.size, hi - base), False
        for run in range(cursors.size):
            at = cursors[run]
            while at < stops[run] and indices[at] < base + width:
                tile[indices[at] - base] += values[at]
                at += 1
            # So many lists are more than the processor follows by itself.
            lanes.prefetch(indices, at + _AHEAD)
            lanes.prefetch(values, at + _AHEAD)
            used |= at > cursors[run]
            cursors[run] = at
        _write(out, base, width, tile, stream)
        if used:
            tile[:] = 0


@compiled
def group(indices, values, lo, hi, width, grouped_indices, grouped_values):
    # The elements from lo to hi, tile by tile, in their order within each.
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
    whole = width // lanes.BLOCK * lanes.BLOCK
    if stream:
        for near in range(0, whole, lanes.BLOCK):
            lanes.copy_streaming(tile, out, near, base + near)
    else:
        for near in range(0, whole, lanes.BLOCK):
            lanes.copy(tile, out, near, base + near)
    for near in range(whole, width):
        out[base + near] = tile[near]


@compiled
def mask(x, indices, values):
    for i in range(indices.size):
        if values[i] != 0:
            x[indices[i]] = 0

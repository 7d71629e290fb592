"""Count sketches.

Hashes are computed a tile at a time, in vectors, and are still in the cache when elements are looked up or added one by
one. `keys` holds the two keys of each row's hash, uint32.
"""

from typing import Any

import numpy as np
from torch import Tensor

from thinwire.kernels.compiled import compiled
from thinwire.kernels.hashing.cpu import draw
from thinwire.kernels.hashing.reference import keys
from thinwire.kernels.matrices.cpu import put
from thinwire.kernels.memory import empty
from thinwire.kernels.ranges import map_ranges
from thinwire.kernels.sketch.reference import SKETCH_ROWS

_TILE = 512
_ELSEWHERE = 16


def sketch_insert(x: Tensor, rows: int, buckets: int, seed: int) -> Tensor:
    """See `reference.sketch_insert`; each thread fills its share of the table, in the order of the indices."""
    table = x.new_zeros(rows, buckets)
    arrays, work = (table.numpy(), x.numpy(), _sketch_keys(rows, seed)), max(1, rows * x.numel())

    def run(lo: int, hi: int) -> None:
        _insert_loop(*arrays, rows * buckets * lo // work, rows * buckets * hi // work)

    map_ranges(run, work)
    return table


def sketch_query(table: Tensor, numel: int, seed: int) -> Tensor:
    out = empty(numel, table.dtype, table.device)
    arrays = (out.numpy(), table.numpy(), _sketch_keys(table.shape[0], seed))
    map_ranges(lambda lo, hi: _query_loop(*arrays, lo, hi), numel)
    return out


def _sketch_keys(rows: int, seed: int) -> np.ndarray[Any, Any]:
    return np.array([keys(SKETCH_ROWS * seed + j) for j in range(rows)], np.uint32)


@compiled
def _hash(places, negative, buckets, high, low):
    for i in range(places.size):
        mixed = draw(i, high, low)
        places[i] = np.int32((np.uint64(mixed >> np.uint32(1)) * np.uint64(buckets)) >> np.uint64(31))
        negative[i] = mixed & np.uint32(1)


@compiled
def _within(places, lo, hi):
    # All other places map to a few cells behind the last one, in turn: adding to one place twice in a row stalls.
    for i in range(places.size):
        near = np.uint32(places[i] - lo)
        places[i] = np.int32(near) if near < np.uint32(hi - lo) else np.int32(hi - lo + (i & (_ELSEWHERE - 1)))


@compiled
def _sign(x, negative):
    for i in range(x.size):
        x[i] = -x[i] if negative[i] else x[i]


@compiled
def _add(cells, places, x):
    for i in range(x.size):
        cells[np.uint32(places[i])] += x[i]


@compiled
def _insert_loop(table, x, keys, lo, hi):
    # Fills cells lo to hi of the table, so that one thread sums each bucket, in order.
    buckets = table.shape[1]
    places, negative, room = np.empty(_TILE, np.int32), np.empty(_TILE, np.uint8), np.empty(_TILE, x.dtype)
    for j in range(lo // buckets, -(-hi // buckets)):
        first, last = max(0, lo - j * buckets), min(buckets, hi - j * buckets)
        cells = np.zeros(last - first + _ELSEWHERE, table.dtype)
        for start in range(0, x.size, _TILE):
            part = x[start : start + _TILE]
            near, sign, signed = places[: part.size], negative[: part.size], room[: part.size]
            _hash(near, sign, buckets, np.uint32(keys[j, 0] + start), keys[j, 1])
            _within(near, first, last)
            put(signed, part)
            _sign(signed, sign)
            _add(cells, near, signed)
        put(table[j, first:last], cells[: last - first])


@compiled
def _order(lower, upper):
    # The larger one goes up, and NaN above all.
    for i in range(lower.size):
        x, y = lower[i], upper[i]
        swap = not (x <= y or y != y)
        lower[i] = y if swap else x
        upper[i] = x if swap else y


@compiled
def _sort(room, width):
    # Sorts every column by exchanging neighbours, which needs no branch.
    for turn in range(room.shape[0]):
        for j in range(turn & 1, room.shape[0] - 1, 2):
            _order(room[j][:width], room[j + 1][:width])


@compiled
def _read(out, row, places):
    for i in range(out.size):
        out[i] = row[np.uint32(places[i])]


@compiled
def _middle(out, lower, upper):
    for i in range(out.size):
        out[i] = (lower[i] + upper[i]) / 2


@compiled
def _query_loop(out, table, keys, lo, hi):
    rows, buckets = table.shape
    places, negative = np.empty(_TILE, np.int32), np.empty(_TILE, np.uint8)
    room = np.empty((rows, _TILE), table.dtype)
    for start in range(lo, hi, _TILE):
        width = min(_TILE, hi - start)
        near, sign = places[:width], negative[:width]
        for j in range(rows):
            _hash(near, sign, buckets, np.uint32(keys[j, 0] + start), keys[j, 1])
            _read(room[j][:width], table[j], near)
            _sign(room[j][:width], sign)
        _sort(room, width)
        _middle(out[start : start + width], room[(rows - 1) // 2], room[rows // 2])

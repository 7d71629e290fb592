"""Hashing indices to slots of a table, and into count sketches; and indices in slot order, small regions together.

Hashes are computed a tile at a time, in vectors, and are still in the cache when elements are looked up or added one by
one. Of a sketch, `keys` holds the two keys of each row's hash, uint32.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from thinwire.kernels import simd
from thinwire.kernels.bits.cpu import pack_bits, pack_loop, unpack_bits, unpack_loop
from thinwire.kernels.compiled import compiled, exactly, vector
from thinwire.kernels.exact.cpu import put
from thinwire.kernels.hashing.reference import SKETCH_ROWS, Slotted, keys
from thinwire.kernels.memory import empty
from thinwire.kernels.parts import Array, Found, Ints, Regions, Vectors, addresses, sizes
from thinwire.kernels.places.cpu import placed
from thinwire.kernels.ranges import map_ranges

_AHEAD = 32
"""How many slots ahead of the one being read an element is fetched."""
_TILE = 512
"""Indices whose slots are computed at a time, in vectors. They stay in the cache until the table is written."""
_SMALL = 1 << 12
"""Slots up to which a region is packed bit by bit, which costs less there than a call does."""
_ELSEWHERE = 16


def hashed_slots_of_each(
    xs: Vectors, indices: Tensor, priorities: Tensor, runs: Ints, slots: Ints, seeds: Ints, regions: Regions
) -> Found:
    if priorities.is_floating_point():
        priorities = priorities.abs().to(torch.float32).view(torch.int32)
    ends, places = (np.concatenate([[0], np.cumsum(counts)]) for counts in (runs, slots))
    out, values = np.empty(places[-1], np.int32), torch.empty(int(places[-1]), dtype=xs[0].dtype, device="cpu")
    arrays = (indices.numpy(), priorities.numpy(), out, values.numpy())
    rounds = _round_keys(seeds)
    _each_hashed_loop(addresses(xs), sizes(xs), ends, places, rounds, *arrays)
    return Found(placed(torch.from_numpy(out), regions, slots), values, values.count_nonzero())


def _round_keys(seeds: Sequence[int]) -> Array:
    """Return the keys of the three rounds for each of several seeds: uint32 (seeds, 3, 2)."""
    words = np.array([seed % (1 << 64) for seed in seeds], np.uint64).view(np.int64)
    return np.stack(keys(3 * words[:, None] + np.arange(3)), axis=-1).astype(np.uint32)


def slots_encode(indices: Tensor, parts: Sequence[Slotted], seeds: Tensor) -> tuple[Tensor, Tensor]:
    table, large, (count, end) = _layout(tuple(parts))
    codes, packed = (
        torch.empty(count, dtype=torch.int32, device="cpu"),
        torch.empty(end, dtype=torch.uint8, device="cpu"),
    )
    keys = _round_keys(seeds.tolist())
    misplaced = _encode_loop(indices.numpy(), table, keys, codes.numpy(), packed.numpy())
    for slots, nbytes, bits in large:
        packed[nbytes] = pack_bits(codes[slots], bits)
    return packed, torch.tensor(misplaced, device="cpu")


def slots_decode(rows: Tensor, parts: Sequence[Slotted], seeds: Tensor) -> Tensor:
    table, large, (count, end) = _layout(tuple(parts))
    codes, found = (torch.empty(*shape, dtype=torch.int32, device="cpu") for shape in ((count,), (len(rows), count)))
    for row, out, own in zip(rows[:, :end], found, seeds.tolist(), strict=True):
        for slots, nbytes, bits in large:
            codes[slots] = unpack_bits(row[nbytes], slots.stop - slots.start, bits, torch.int32)
        _decode_loop(row.numpy(), table, _round_keys(own), codes.numpy(), out.numpy())
    return found


@lru_cache(maxsize=256)
def _layout(parts: tuple[Slotted, ...]) -> tuple[Array, Sequence[tuple[slice, slice, int]], Sequence[int]]:
    """Return how regions lie: for each its offset, length, slots, bits and first byte; and how many slots and bytes.

    Of the large ones, their slots, bytes and bits are returned as well.
    """
    sizes = [(0, 0)] + [(part.slots, part.nbytes if part.slots else 0) for part in parts]
    places = np.cumsum(sizes, axis=0).tolist()
    rows = [(*part, part.bits, begin) for part, (_, begin) in zip(parts, places, strict=False)]
    large = [
        (slice(first, last), slice(begin, end), part.bits)
        for part, (first, begin), (last, end) in zip(parts, places, places[1:], strict=False)
        if part.slots > _SMALL
    ]
    return np.array(rows, np.int64).reshape(-1, 5), large, places[-1]


@exactly
def draw(index, high, low):
    """`reference.mix` on 32-bit keys. To hash index + offset, add the offset to the high key."""
    # Because every step is cut to 32 bits, LLVM computes in 32 bits, and in vectors.
    x = np.uint32(np.uint32(index) + high)
    x = np.uint32((x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D))
    x = np.uint32(x ^ low)
    x = np.uint32((x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B))
    return np.uint32(x ^ (x >> np.uint32(16)))


@exactly
def _within(x, bound, keys):
    return np.uint32((np.uint64(draw(x, keys[0], keys[1])) * np.uint64(bound)) >> np.uint64(32))


@exactly
def _below(x, bound):
    # Brings the sum of two numbers below a bound back below it.
    return np.uint32(x - bound) if x >= bound else x


@exactly
def _slots_of(indices, slots, height, keys, slot, quotient):
    # `reference.slot_of`. The quotient of two numbers below 2³¹ is exact when a float64 is cut.
    first, second, third = (keys[0, 0], keys[0, 1]), (keys[1, 0], keys[1, 1]), (keys[2, 0], keys[2, 1])
    for i in range(indices.size):
        q = np.uint32(np.int32(np.float64(indices[i]) / np.float64(slots)))
        s = np.uint32(np.uint32(indices[i]) - np.uint32(q * slots))
        s = _below(np.uint32(s + _within(q, slots, first)), slots)
        q = _below(np.uint32(q + _within(s, height, second)), height)
        slot[i] = _below(np.uint32(s + _within(q, slots, third)), slots)
        quotient[i] = q


@exactly
def _indices_of(slot, quotient, slots, height, keys, indices):
    # `reference.index_of`; quotients are below the height.
    first, second, third = (keys[0, 0], keys[0, 1]), (keys[1, 0], keys[1, 1]), (keys[2, 0], keys[2, 1])
    for i in range(slot.size):
        s, q = np.uint32(slot[i]), np.uint32(quotient[i])
        s = _below(np.uint32(s + np.uint32(slots - _within(q, slots, third))), slots)
        q = _below(np.uint32(q + np.uint32(height - _within(s, height, second))), height)
        s = _below(np.uint32(s + np.uint32(slots - _within(q, slots, first))), slots)
        indices[i] = np.uint32(np.uint32(q * slots) + s)


@compiled
def _hashed_slots_loop(table, indices, priorities, height, keys):
    slot, quotient = np.empty(_TILE, np.uint32), np.empty(_TILE, np.uint32)
    for start in range(0, indices.size, _TILE):
        part, ranks = indices[start : start + _TILE], priorities[start : start + _TILE]
        _slots_of(part, np.uint32(table.size), height, keys, slot, quotient)
        for i in range(part.size):
            if part[i] >= 0:
                table[slot[i]] = max(table[slot[i]], np.int64(ranks[i]) << 32 | np.int64(part[i]))


@compiled
def _each_hashed_loop(vectors, lengths, ends, places, keys, indices, priorities, out, values):
    for at in range(lengths.size):
        slots = out[places[at] : places[at + 1]]
        table, height = np.full(slots.size, -1, np.int64), np.uint32(-(-lengths[at] // max(1, slots.size)))
        here, there = indices[ends[at] : ends[at + 1]], priorities[ends[at] : ends[at + 1]]
        _hashed_slots_loop(table, here, there, height, keys[at])
        x, elements = vector(vectors[at, 0], lengths[at], values), values[places[at] : places[at + 1]]
        for slot in range(slots.size):
            slots[slot] = np.int32(table[slot] & 0xFFFFFFFF)
        for slot in range(slots.size):
            if slot + _AHEAD < slots.size:
                simd.prefetch(x, max(slots[slot + _AHEAD], 0))
            elements[slot] = x[slots[slot]] if slots[slot] >= 0 else 0


@compiled
def _codes_loop(indices, numel, height, keys, codes):
    # `reference.slot_codes` with the keys of the rounds, into `codes`.
    slot, quotient = np.empty(_TILE, np.uint32), np.empty(_TILE, np.uint32)
    for start in range(0, indices.size, _TILE):
        part, out = indices[start : start + _TILE], codes[start : start + _TILE]
        _slots_of(part, np.uint32(indices.size), height, keys, slot, quotient)
        for i in range(part.size):
            placed = 0 <= part[i] < numel and slot[i] == start + i
            out[i] = quotient[i] if placed else height if part[i] == numel - 1 else -1


@compiled
def _indices_loop(codes, numel, height, keys, indices):
    # `reference.slot_indices` with the keys of the rounds, into `indices`.
    slot, quotient, found = np.empty(_TILE, np.uint32), np.empty(_TILE, np.uint32), np.empty(_TILE, np.uint32)
    for start in range(0, codes.size, _TILE):
        part, out = codes[start : start + _TILE], indices[start : start + _TILE]
        for i in range(part.size):
            slot[i] = start + i
            quotient[i] = part[i] if 0 <= part[i] < height else 0
        _indices_of(slot[: part.size], quotient, np.uint32(codes.size), height, keys, found)
        for i in range(part.size):
            known = 0 <= part[i] < height and found[i] < numel
            out[i] = found[i] if known else numel - 1 if part[i] == height else -1


@compiled
def _encode_loop(indices, table, keys, every_code, packed):
    # Codes of large regions are packed later.
    misplaced, first = 0, 0
    for at in range(len(table)):
        offset, length, slots, bits, start = table[at]
        codes = every_code[first : first + slots]
        within = indices[first : first + slots] - np.int32(offset)
        _codes_loop(within, length, np.uint32(-(-length // max(1, slots))), keys[at], codes)
        if slots <= _SMALL:
            pack_loop(codes, bits, 0, slots, packed[start:])
        for i in range(slots):
            misplaced += codes[i] < 0
        first += slots
    return misplaced


@compiled
def _decode_loop(row, table, keys, every_code, out):
    # Codes of large regions were unpacked before.
    first = 0
    for at in range(len(table)):
        offset, length, slots, bits, place = table[at]
        codes, indices = every_code[first : first + slots], out[first : first + slots]
        if slots <= _SMALL:
            unpack_loop(row[place:], bits, 0, slots, codes)
        _indices_loop(codes, length, np.uint32(-(-length // max(1, slots))), keys[at], indices)
        for i in range(slots):
            if indices[i] >= 0:
                indices[i] += np.int32(offset)
        first += slots


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


def _sketch_keys(rows: int, seed: int) -> Array:
    return np.array([keys(SKETCH_ROWS * seed + j) for j in range(rows)], np.uint32)


@compiled
def _hash(places, negative, buckets, high, low):
    for i in range(places.size):
        mixed = draw(i, high, low)
        places[i] = np.int32((np.uint64(mixed >> np.uint32(1)) * np.uint64(buckets)) >> np.uint64(31))
        negative[i] = mixed & np.uint32(1)


@compiled
def _nearby(places, lo, hi):
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
            _nearby(near, first, last)
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

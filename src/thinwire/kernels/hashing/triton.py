"""Hashing indices to slots of a table, and into count sketches; and indices in slot order, all regions in a launch."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from thinwire.kernels.bits.triton import code_at
from thinwire.kernels.hashing import reference
from thinwire.kernels.hashing.reference import SKETCH_ROWS, Slotted, keys
from thinwire.kernels.memory import constant, sent
from thinwire.kernels.parts import Fit, Found, Ints, Regions, Vectors
from thinwire.kernels.places.triton import FIXED, differs
from thinwire.kernels.triton import addresses, fitting, launch, pointer, table_of, tiles_of, tiles_of_each, wide

_BLOCK = 1024
_SKETCHED = 256
_PART = 1 << 22
"""Elements sorted at a time, so that the keys take no memory the size of the vector."""


def hashed_slots_of_each(
    xs: Vectors, indices: Tensor, priorities: Tensor, runs: Ints, slots: Ints, seeds: Ints, regions: Regions
) -> Found:
    device, lengths, where = indices.device, [x.numel() for x in xs], addresses(xs)
    firsts, starts = (list(accumulate(counts[:-1], initial=0)) for counts in (runs, slots))
    offsets = [offset for offset, _ in regions]
    columns = table_of(device, lambda: (where, lengths, slots, list(seeds), firsts, runs, starts, offsets))
    zeros = torch.zeros(1 + sum(slots), dtype=torch.int64, device=device)
    carried, held = zeros[0], zeros[1:]
    tiles = tiles_of_each(tuple(runs), device, _BLOCK)
    launch(_hash_each, len(tiles), held, indices, priorities, *columns[1:7], tiles, BLOCK=_BLOCK)
    return elements(xs, carried, held, slots, Fit(xs[0].dtype), *columns[:3], *columns[6:])


def elements(xs: Vectors, carried: Tensor, held: Tensor, slots: Ints, fit: Fit, *columns: Tensor) -> Found:
    """Return what slots hold. Columns: where vectors lie, their lengths, slots, first slots and offsets."""
    out, values = torch.empty_like(held, dtype=torch.int32), xs[0].new_empty(sum(slots), dtype=fit.dtype)
    tiles = tiles_of_each(tuple(slots), held.device, _BLOCK)
    args = (out, values, carried, fit.bound, xs[0].new_empty(0), held, *columns, tiles)
    launch(_elements_of_each, len(tiles), *args, BLOCK=_BLOCK)
    return Found(out, values, carried)


def signed_keys(seed: int) -> tuple[int, int]:
    """Return `keys` as signed numbers, so that Triton compiles for the same types whatever the seed."""
    high, low = ((key ^ 0x80000000) - 0x80000000 for key in keys(seed))
    return high, low


def signed_keys_of(seeds: Sequence[int]) -> "tuple[NDArray[Any], NDArray[Any]]":
    """Return the same of several seeds, two columns of a `table`."""
    high, low = (key.astype(np.uint32).view(np.int32) for key in keys(np.array(list(seeds), np.uint64).view(np.int64)))
    return high, low


def slots_encode(indices: Tensor, parts: Sequence[Slotted], seeds: Tensor) -> tuple[Tensor, Tensor]:
    out = torch.empty(sum(part.nbytes for part in parts), dtype=torch.uint8, device=indices.device)
    tiles = tiles_of_each(tuple(part.nbytes for part in parts), out.device, _BLOCK)
    misplaced = torch.empty(len(tiles), dtype=torch.int64, device=out.device)
    args = (out, indices, misplaced, _columns(parts, out.device), seeds, len(parts), tiles)
    launch(_encode, len(tiles), *args, BLOCK=_BLOCK)
    return out, misplaced


def slots_read(rows: Tensor, fixed: Tensor, parts: Sequence[Slotted]) -> tuple[Tensor, Tensor]:
    count = sum(part.slots for part in parts)
    if not count or (rows.storage_offset() | rows.stride(0)) % 8 or rows.stride(1) != 1:
        return reference.slots_read(rows, fixed, parts)
    out = torch.empty(rows.shape[0], count, dtype=torch.int32, device=rows.device)
    tiles = tiles_of_each(tuple(part.slots for part in parts), rows.device, _BLOCK)
    wrong = torch.empty(len(tiles) * rows.shape[0], dtype=torch.bool, device=rows.device)
    args = (out, rows, _columns(parts, rows.device), rows.stride(0), count, len(parts), tiles, len(tiles))
    launch(_read, wrong.numel(), *args, wrong, fixed, fixed.shape[1], BLOCK=_BLOCK, FIXED=FIXED)
    return out, wrong


def _columns(parts: Sequence[Slotted], device: torch.device) -> Tensor:
    """Return what the kernels need to know of each part, int64 (6, parts)."""
    places, starts = (accumulate(sizes, initial=0) for sizes in ([p.slots for p in parts], [p.nbytes for p in parts]))
    rows = [(*part[:3], part.bits, place, start) for part, place, start in zip(parts, places, starts, strict=False)]
    return constant(tuple(number for column in zip(*rows, strict=True) for number in column), torch.int64, device)


@triton.jit
def hash32(x, high, low):
    """Hash the low 32 bits of integers to uint32: `reference.mix`, without masks because this type wraps."""
    x = x.to(tl.uint32) + high.to(tl.uint32)
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = x ^ low.to(tl.uint32)
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _within(x, bound, seed):
    key = (seed + 1) * -0x61C8864680B583EB  # `reference.keys`
    return ((hash32(x, key >> 32, key).to(tl.uint64) * bound.to(tl.uint64)) >> 32).to(tl.int64)


@triton.jit
def _slot_of(index, slots, height, seed):
    """Return `reference.slot_of` of indices, all int64."""
    # One subtraction brings the sum of two numbers below a bound back below it.
    q = index // slots
    s = index - q * slots + _within(q, slots, 3 * seed)
    s -= tl.where(s >= slots, slots, 0)
    q += _within(s, height, 3 * seed + 1)
    q -= tl.where(q >= height, height, 0)
    s += _within(q, slots, 3 * seed + 2)
    return s - tl.where(s >= slots, slots, 0), q


@triton.jit
def _index_of(s, q, slots, height, seed):
    """Return `reference.index_of` of slots and quotients, all int64."""
    s -= _within(q, slots, 3 * seed + 2)
    s += tl.where(s < 0, slots, 0)
    q -= _within(s, height, 3 * seed + 1)
    q += tl.where(q < 0, height, 0)
    s -= _within(q, slots, 3 * seed)
    return q * slots + s + tl.where(s < 0, slots, 0)


@triton.jit
def _hash_each(held, indices, priorities, length, slots, seed, first, size, start, tiles, BLOCK: tl.constexpr):
    vector = tl.load(tiles + 3 * tl.program_id(0))
    place = tl.load(tiles + 3 * tl.program_id(0) + 1) + tl.arange(0, BLOCK)
    there = place < tl.load(size + vector)
    at = tl.load(first + vector) + place
    index = tl.load(indices + at, mask=there, other=-1).to(tl.int64)
    rank = tl.load(priorities + at, mask=there, other=0)
    many, n = tl.load(slots + vector), tl.load(length + vector)
    hold(held + tl.load(start + vector), index, rank, there & (index >= 0), n, many, tl.load(seed + vector))


@triton.jit
def hold(held, index, rank, there, n, slots, seed):
    """Put indices (int64) below n into their slots, of which each keeps that of the highest rank."""
    slot, _ = _slot_of(tl.where(there, index, 0), slots, (n + slots - 1) // tl.maximum(slots, 1), seed)
    if rank.dtype.is_floating():
        rank = tl.abs(rank).to(tl.float32).to(tl.int32, bitcast=True)
    ranked = ((rank.to(tl.int64) << 32) | index) + 1  # 0 is an empty slot
    tl.atomic_max(held + slot, ranked, mask=there, sem="relaxed")


@triton.jit
def _elements_of_each(
    out, values, carried, bound, like, held, address, length, slots, start, offset, tiles, BLOCK: tl.constexpr
):
    vector = tl.load(tiles + 3 * tl.program_id(0))
    place = tl.load(tiles + 3 * tl.program_id(0) + 1) + tl.arange(0, BLOCK)
    there, at = place < tl.load(slots + vector), tl.load(start + vector) + place
    index = (tl.load(held + at, mask=there, other=0) - 1).to(tl.int32)  # of a rank and an index, the lower half
    place = tl.where(index < 0, tl.load(length + vector) - 1, index) + tl.load(offset + vector)
    tl.store(out + at, place.to(tl.int32), mask=there)
    x = tl.load(pointer(address, vector, like) + index, mask=there & (index >= 0), other=0.0)
    x = fitting(x, bound, values)
    tl.store(values + at, x, mask=there)
    tl.atomic_add(carried, tl.sum((wide(x) != 0).to(tl.int64), 0), sem="relaxed")


@triton.jit
def _part(columns, part, parts):
    """Return a part's offset, length, slots, bits of a code, first place, and first byte."""
    at = columns + part
    offset, length, slots = tl.load(at), tl.load(at + parts), tl.load(at + 2 * parts)
    return offset, length, slots, tl.load(at + 3 * parts), tl.load(at + 4 * parts), tl.load(at + 5 * parts)


@triton.jit(do_not_specialize=["parts"])
def _encode(out, indices, misplaced, columns, seeds, parts, tiles, BLOCK: tl.constexpr):
    """Write bytes, each from the codes that overlap it. A code in no slot counts where it begins."""
    part = tl.load(tiles + 3 * tl.program_id(0))
    offset, length, slots, bits, before, start = _part(columns, part, parts)
    at = tl.load(tiles + 3 * tl.program_id(0) + 1) + tl.arange(0, BLOCK).to(tl.int64)
    there, first = at < (slots * bits + 7) // 8, at * 8 // bits
    height, seed = (length + slots - 1) // slots, tl.load(seeds + part)
    byte, wrong = tl.zeros([BLOCK], tl.int64), tl.zeros([BLOCK], tl.int64)
    for j in range((8 + bits - 2) // bits + 1):  # a byte overlaps at most this many codes
        place = first + j
        some = there & (place < slots)
        index = tl.load(indices + before + place, mask=some, other=0) - offset
        inside = (index >= 0) & (index < length)
        slot, quotient = _slot_of(tl.where(inside, index, 0), slots, height, seed)
        code = tl.where((slot == place) & inside, quotient, tl.where(index == length - 1, height, -1))
        wrong += (some & (code < 0) & (place * bits // 8 == at)).to(tl.int64)
        code = tl.where(some, code, 0)
        byte |= ((code & ((1 << bits) - 1)) << (j * bits)) >> (at * 8 - first * bits)
    tl.store(out + start + at, (byte & 255).to(tl.uint8), mask=there)
    tl.store(misplaced + tl.program_id(0), tl.sum(wrong, 0))


@triton.jit(do_not_specialize=["row_stride", "total", "parts", "count", "fixed_count"])
def _read(
    out, rows, columns, row_stride, total, parts, tiles, count, wrong, fixed, fixed_count,
    BLOCK: tl.constexpr, FIXED: tl.constexpr,
):  # fmt: skip
    row, tile = (tl.program_id(0) // count).to(tl.int64), tl.program_id(0) % count
    part, begin = tl.load(tiles + 3 * tile), rows + row * row_stride
    offset, length, slots, bits, first, start = _part(columns, part, parts)
    place = tl.load(tiles + 3 * tile + 1) + tl.arange(0, BLOCK).to(tl.int64)
    there = place < slots
    code = code_at(begin + 8 + 8 * parts + start, place, there, bits, (slots * bits + 7) // 8, 5)
    height = (length + slots - 1) // slots
    seed = tl.load((begin + 8).to(tl.pointer_type(tl.int64), bitcast=True) + part)
    index = _index_of(place, tl.minimum(code, tl.maximum(height - 1, 0)), slots, height, seed)
    index = tl.where((code < height) & (index < length), index, -1)
    index = tl.where(code == height, length - 1, index)
    bad = tl.max((there & (index < 0)).to(tl.int32), 0) > 0
    if tile == 0:
        bad |= differs(begin, fixed, 1, 0, 1, fixed_count, FIXED)
    tl.store(wrong + tl.program_id(0), bad)
    tl.store(out + row * total + first + place, tl.where(index < 0, 0, index + offset).to(tl.int32), mask=there)


def sketch_insert(x: Tensor, rows: int, buckets: int, seed: int) -> Tensor:
    """See `reference.sketch_insert`; elements are sorted by bucket, since atomics would add in any order."""
    table = x.new_zeros(rows, buckets)
    edges = torch.arange(buckets + 1, dtype=torch.int32, device=x.device)
    for j in range(rows):
        for offset in range(0, x.numel(), _PART):
            _insert(table[j], x[offset : offset + _PART], offset, edges, signed_keys(SKETCH_ROWS * seed + j))
    return table


def _insert(cells: Tensor, part: Tensor, offset: int, edges: Tensor, keys: tuple[int, int]) -> None:
    bucket, buckets = torch.empty(part.shape, dtype=torch.int32, device=part.device), cells.numel()
    launch(_bucket_of, tiles_of(part.numel(), _SKETCHED), bucket, part.numel(), offset, buckets, *keys, BLOCK=_SKETCHED)
    bucket, order = bucket.sort(stable=True)
    begins = torch.searchsorted(bucket, edges)
    args = (cells, part, order, begins, offset, buckets, *keys)
    launch(_add_up, tiles_of(buckets, _SKETCHED), *args, BLOCK=_SKETCHED)


def sketch_query(table: Tensor, numel: int, seed: int) -> Tensor:
    (rows, buckets), out = table.shape, table.new_empty(numel)
    keys = np.array([signed_keys(SKETCH_ROWS * seed + j) for j in range(rows)], np.int32)
    words = sent(torch.frombuffer(keys, dtype=torch.int32).view(rows, 2), table.device)
    padded = max(2, triton.next_power_of_2(rows))
    ones = (1 << 63) - 1 if table.dtype == torch.float64 else (1 << 31) - 1
    args = (table, words, out, numel, buckets)
    launch(_query, tiles_of(numel, _SKETCHED), *args, COUNT=rows, ROWS=padded, ONES=ones, BLOCK=_SKETCHED)
    return out


@triton.jit
def _sketch_hash(index, buckets, high, low):
    """Return the bucket and whether the sign is −."""
    mixed = hash32(index, high, low)
    bucket = ((mixed >> 1).to(tl.uint64) * buckets.to(tl.uint64)) >> 31
    return bucket.to(tl.int64), (mixed & 1) != 0


@triton.jit(do_not_specialize=["offset", "buckets", "high", "low"])
def _bucket_of(bucket, n, offset, buckets, high, low, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place, _ = _sketch_hash(offset + at, buckets, high, low)
    tl.store(bucket + at, place.to(tl.int32), mask=at < n)


@triton.jit(do_not_specialize=["offset", "buckets", "high", "low"])
def _add_up(cells, x, order, begins, offset, buckets, high, low, BLOCK: tl.constexpr):
    cell = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = cell < buckets
    at = tl.load(begins + cell, mask=there, other=0)
    end = tl.load(begins + cell + 1, mask=there, other=0)
    total = wide(tl.load(cells + cell, mask=there, other=0.0))
    for _ in range(tl.max(end - at, 0)):
        index = tl.load(order + at, mask=at < end, other=0)
        _, minus = _sketch_hash(offset + index, buckets, high, low)
        value = wide(tl.load(x + index, mask=at < end, other=0.0))
        total += tl.where(minus, -value, value)
        at += 1
    tl.store(cells + cell, total.to(cells.dtype.element_ty), mask=there)


@triton.jit
def _ordered(bits, ONES: tl.constexpr):
    """Turn floats' bits into integers of the same order, and back."""
    return tl.where(bits < 0, bits ^ ONES, bits)


@triton.jit(do_not_specialize=["buckets"])
def _query(
    table, words, out, n, buckets, COUNT: tl.constexpr, ROWS: tl.constexpr, ONES: tl.constexpr, BLOCK: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row = tl.arange(0, ROWS)[None, :]
    high = tl.load(words + 2 * row, mask=row < COUNT, other=0)
    low = tl.load(words + 2 * row + 1, mask=row < COUNT, other=0)
    bucket, minus = _sketch_hash(at[:, None], buckets, high, low)
    there = (row < COUNT) & (at < n)[:, None]
    value = wide(tl.load(table + row * buckets.to(tl.int64) + bucket, mask=there, other=0.0))
    value = tl.where(minus, -value, value)
    if value.dtype.primitive_bitwidth == 64:
        bits = value.to(tl.int64, bitcast=True)
    else:
        bits = value.to(tl.int32, bitcast=True)
    # NaN of either sign goes last, with only the rows' padding behind it.
    ranks = tl.where(value != value, ONES - 1, _ordered(bits, ONES))
    ranks = tl.sort(tl.where(row < COUNT, ranks, ONES), dim=1)
    lower = _ordered(tl.sum(tl.where(row == (COUNT - 1) // 2, ranks, 0), 1), ONES).to(value.dtype, bitcast=True)
    upper = _ordered(tl.sum(tl.where(row == COUNT // 2, ranks, 0), 1), ONES).to(value.dtype, bitcast=True)
    tl.store(out + at, ((lower + upper) / 2).to(out.dtype.element_ty), mask=at < n)

"""Count sketches."""

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.kernels.hashing.triton import hash32, signed_keys
from thinwire.kernels.memory import sent
from thinwire.kernels.sketch.reference import SKETCH_ROWS
from thinwire.kernels.triton import launch, tiles_of, wide

_BLOCK = 256
_PART = 1 << 22
"""Elements sorted at a time, so that the keys take no memory the size of the vector."""


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
    launch(_bucket_of, tiles_of(part.numel(), _BLOCK), bucket, part.numel(), offset, buckets, *keys, BLOCK=_BLOCK)
    bucket, order = bucket.sort(stable=True)
    begins = torch.searchsorted(bucket, edges)
    args = (cells, part, order, begins, offset, buckets, *keys)
    launch(_add_up, tiles_of(buckets, _BLOCK), *args, BLOCK=_BLOCK)


def sketch_query(table: Tensor, numel: int, seed: int) -> Tensor:
    (rows, buckets), out = table.shape, table.new_empty(numel)
    keys = np.array([signed_keys(SKETCH_ROWS * seed + j) for j in range(rows)], np.int32)
    words = sent(torch.frombuffer(keys, dtype=torch.int32).view(rows, 2), table.device)
    padded = max(2, triton.next_power_of_2(rows))
    ones = (1 << 63) - 1 if table.dtype == torch.float64 else (1 << 31) - 1
    args = (table, words, out, numel, buckets)
    launch(_query, tiles_of(numel, _BLOCK), *args, COUNT=rows, ROWS=padded, ONES=ones, BLOCK=_BLOCK)
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

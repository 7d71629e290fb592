"""Hashing indices to slots of a table."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from thinwire.kernels.hashing.reference import keys
from thinwire.kernels.segments.triton import addresses, pointer, table_of, tiles_of_each
from thinwire.kernels.triton import launch, tiles_of

_BLOCK = 1024
_KEYS = [f"{word}{j}" for j in range(3) for word in ("high", "low")]


def slot_of(indices: Tensor, slots: int, numel: int, seed: int) -> tuple[Tensor, Tensor]:
    slot, quotient = (torch.empty(indices.shape, dtype=torch.int64, device=indices.device) for _ in range(2))
    args = (indices, slot, quotient, indices.numel(), slots, -(-numel // max(1, slots)), *_round_keys(seed))
    launch(_slots_of, tiles_of(indices.numel(), _BLOCK), *args, BLOCK=_BLOCK)
    return slot, quotient


def index_of(slot: Tensor, quotient: Tensor, slots: int, numel: int, seed: int) -> Tensor:
    indices = torch.empty(slot.shape, dtype=torch.int64, device=slot.device)
    args = (slot, quotient, indices, slot.numel(), slots, -(-numel // max(1, slots)), *_round_keys(seed))
    launch(_indices_of, tiles_of(slot.numel(), _BLOCK), *args, BLOCK=_BLOCK)
    return indices


def hashed_slots(indices: Tensor, priorities: Tensor, slots: int, numel: int, seed: int) -> Tensor:
    """See `reference.hashed_slots`; the maximum of integers is the same in any order."""
    table = torch.full((slots,), -1, dtype=torch.int64, device=indices.device)
    args = (table, indices, priorities, indices.numel(), slots, -(-numel // max(1, slots)), *_round_keys(seed))
    launch(_hashed_slots, tiles_of(indices.numel(), _BLOCK), *args, BLOCK=_BLOCK)
    return table.to(torch.int32)


def hashed_slots_of_each(
    xs: Sequence[Tensor],
    indices: Tensor,
    priorities: Tensor,
    runs: Sequence[int],
    slots: Sequence[int],
    seeds: Sequence[int],
) -> tuple[Tensor, Tensor]:
    device, lengths, where = indices.device, [x.numel() for x in xs], addresses(xs)
    firsts, starts = (list(accumulate(counts[:-1], initial=0)) for counts in (runs, slots))
    columns = table_of(device, lambda: (where, lengths, slots, list(seeds), firsts, runs, starts))
    held = torch.full((sum(slots),), -1, dtype=torch.int64, device=device)
    tiles = tiles_of_each(tuple(runs), device, _BLOCK)
    launch(_hash_each, tiles.total, held, indices, priorities, *columns[1:], *tiles, BLOCK=_BLOCK)
    out, values = torch.empty_like(held, dtype=torch.int32), xs[0].new_empty(sum(slots))
    tiles = tiles_of_each(tuple(slots), device, _BLOCK)
    launch(_elements_of_each, tiles.total, out, values, held, columns[0], columns[2], columns[6], *tiles, BLOCK=_BLOCK)
    return out, values


def signed_keys(seed: int) -> tuple[int, int]:
    """Return `keys` as signed numbers, so that Triton compiles for the same types whatever the seed."""
    high, low = ((key ^ 0x80000000) - 0x80000000 for key in keys(seed))
    return high, low


def signed_keys_of(seeds: Sequence[int]) -> "tuple[NDArray[Any], NDArray[Any]]":
    """Return the same of several seeds, two columns of a `table`."""
    with np.errstate(over="ignore"):  # modulo 2⁶⁴
        found = (np.array(list(seeds), np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    return (found >> np.uint64(32)).astype(np.uint32).view(np.int32), found.astype(np.uint32).view(np.int32)


def _round_keys(seed: int) -> tuple[int, ...]:
    return tuple(key for j in range(3) for key in signed_keys(3 * seed + j))


@triton.jit
def hash32(x, high, low):
    """Hash the low 32 bits of integers to uint32: `reference.mix`, without masks because this type wraps."""
    x = x.to(tl.uint32) + high.to(tl.uint32)
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = x ^ low.to(tl.uint32)
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _within(x, bound, high, low):
    return ((hash32(x, high, low).to(tl.uint64) * bound.to(tl.uint64)) >> 32).to(tl.int64)


@triton.jit
def _slot(index, slots, height, high0, low0, high1, low1, high2, low2):
    # One subtraction brings the sum of two numbers below a bound back below it.
    q = index // slots
    s = index - q * slots + _within(q, slots, high0, low0)
    s -= tl.where(s >= slots, slots, 0)
    q += _within(s, height, high1, low1)
    q -= tl.where(q >= height, height, 0)
    s += _within(q, slots, high2, low2)
    return s - tl.where(s >= slots, slots, 0), q


@triton.jit
def _back(s, q, slots, height, high0, low0, high1, low1, high2, low2):
    s -= _within(q, slots, high2, low2)
    s += tl.where(s < 0, slots, 0)
    q -= _within(s, height, high1, low1)
    q += tl.where(q < 0, height, 0)
    s -= _within(q, slots, high0, low0)
    return q * slots + s + tl.where(s < 0, slots, 0)


@triton.jit
def _keys(seed):
    """Return `reference.keys` of a seed (int64)."""
    key = (seed + 1) * -0x61C8864680B583EB
    return key >> 32, key


@triton.jit
def slot_and_quotient(index, slots, height, seed):
    """Return `reference.slot_of` of indices, all int64."""
    high0, low0 = _keys(3 * seed)
    high1, low1 = _keys(3 * seed + 1)
    high2, low2 = _keys(3 * seed + 2)
    return _slot(index, slots, height, high0, low0, high1, low1, high2, low2)


@triton.jit
def slot_back(slot, quotient, slots, height, seed):
    """Return `reference.index_of` of slots and quotients, all int64."""
    high0, low0 = _keys(3 * seed)
    high1, low1 = _keys(3 * seed + 1)
    high2, low2 = _keys(3 * seed + 2)
    return _back(slot, quotient, slots, height, high0, low0, high1, low1, high2, low2)


@triton.jit(do_not_specialize=["slots", "height", *_KEYS])
def _slots_of(indices, slot, quotient, n, slots, height, high0, low0, high1, low1, high2, low2, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    index = tl.load(indices + at, mask=at < n, other=0).to(tl.int64)
    s, q = _slot(index, slots.to(tl.int64), height.to(tl.int64), high0, low0, high1, low1, high2, low2)
    tl.store(slot + at, s, mask=at < n)
    tl.store(quotient + at, q, mask=at < n)


@triton.jit(do_not_specialize=["slots", "height", *_KEYS])
def _indices_of(slot, quotient, indices, n, slots, height, high0, low0, high1, low1, high2, low2, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    s = tl.load(slot + at, mask=at < n, other=0).to(tl.int64)
    q = tl.load(quotient + at, mask=at < n, other=0).to(tl.int64)
    index = _back(s, q, slots, height, high0, low0, high1, low1, high2, low2)
    tl.store(indices + at, index, mask=at < n)


@triton.jit(do_not_specialize=["slots", "height", *_KEYS])
def _hashed_slots(
    table, indices, priorities, n, slots, height, high0, low0, high1, low1, high2, low2, BLOCK: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    index = tl.load(indices + at, mask=at < n, other=-1).to(tl.int64)
    there = index >= 0
    index = tl.where(there, index, 0)
    s, _ = _slot(index, slots.to(tl.int64), height.to(tl.int64), high0, low0, high1, low1, high2, low2)
    ranked = (tl.load(priorities + at, mask=at < n, other=0).to(tl.int64) << 32) | index
    tl.atomic_max(table + s, ranked, mask=there, sem="relaxed")


@triton.jit(do_not_specialize=["count"])
def _hash_each(held, indices, priorities, length, slots, seed, first, size, start, tiles, count, BLOCK: tl.constexpr):
    vector = tl.load(tiles + tl.program_id(0))
    place = tl.load(tiles + count + tl.program_id(0)) + tl.arange(0, BLOCK)
    there = place < tl.load(size + vector)
    at = tl.load(first + vector) + place
    index = tl.load(indices + at, mask=there, other=-1).to(tl.int64)
    there = there & (index >= 0)
    many = tl.load(slots + vector)
    height = (tl.load(length + vector) + many - 1) // tl.maximum(many, 1)
    slot, _ = slot_and_quotient(tl.where(there, index, 0), many, height, tl.load(seed + vector))
    ranked = (tl.load(priorities + at, mask=there, other=0).to(tl.int64) << 32) | index
    tl.atomic_max(held + tl.load(start + vector) + slot, ranked, mask=there, sem="relaxed")


@triton.jit(do_not_specialize=["count"])
def _elements_of_each(out, values, held, address, slots, start, tiles, count, BLOCK: tl.constexpr):
    vector = tl.load(tiles + tl.program_id(0))
    place = tl.load(tiles + count + tl.program_id(0)) + tl.arange(0, BLOCK)
    there, at = place < tl.load(slots + vector), tl.load(start + vector) + place
    index = tl.load(held + at, mask=there, other=-1).to(tl.int32)  # of a rank and an index, the lower half
    tl.store(out + at, index, mask=there)
    x = tl.load(pointer(address, vector, values) + index, mask=there & (index >= 0), other=0.0)
    tl.store(values + at, x, mask=there)

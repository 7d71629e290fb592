"""Hashing indices to slots of a table, and coding indices that are in slot order."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinwire.kernels.compiled import compiled, exactly
from thinwire.kernels.hashing.reference import keys
from thinwire.kernels.several import addresses, sizes, vector


def slot_of(indices: Tensor, slots: int, numel: int, seed: int) -> tuple[Tensor, Tensor]:
    """See `reference.slot_of`."""
    slot, quotient = np.empty(indices.numel(), np.int64), np.empty(indices.numel(), np.int64)
    _slots_loop(indices.numpy(), slots, -(-numel // max(1, slots)), _round_keys(seed), slot, quotient)
    return torch.from_numpy(slot), torch.from_numpy(quotient)


def index_of(slot: Tensor, quotient: Tensor, slots: int, numel: int, seed: int) -> Tensor:
    """See `reference.index_of`."""
    indices = np.empty(slot.numel(), np.int64)
    _indices_loop(slot.numpy(), quotient.numpy(), slots, -(-numel // max(1, slots)), _round_keys(seed), indices)
    return torch.from_numpy(indices)


def hashed_slots(indices: Tensor, priorities: Tensor, slots: int, numel: int, seed: int) -> Tensor:
    """See `reference.hashed_slots`."""
    table = np.full(slots, -1, np.int64)
    height = -(-numel // max(1, slots))
    _hashed_slots_loop(table, indices.numpy(), priorities.numpy(), height, _round_keys(seed))
    return torch.from_numpy(table.astype(np.int32))


def hashed_slots_of_each(
    xs: Sequence[Tensor],
    indices: Tensor,
    priorities: Tensor,
    runs: Sequence[int],
    slots: Sequence[int],
    seeds: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """See `reference.hashed_slots_of_each`."""
    ends, places = (np.concatenate([[0], np.cumsum(counts)]) for counts in (runs, slots))
    out, values = np.empty(places[-1], np.int32), torch.empty(int(places[-1]), dtype=xs[0].dtype)
    arrays = (indices.numpy(), priorities.numpy(), out, values.numpy())
    keys = np.stack([_round_keys(seed) for seed in seeds])
    _each_hashed_loop(addresses(xs), sizes(xs), ends, places, keys, *arrays)
    return torch.from_numpy(out), values


def _round_keys(seed: int) -> np.ndarray[Any, Any]:
    """Return the keys of the three rounds."""
    return np.array([keys(3 * seed + j) for j in range(3)], np.uint64)


def slot_codes(indices: Tensor, numel: int, seed: int) -> Tensor:
    """See `reference.slot_codes`."""
    codes = np.empty(indices.numel(), np.int32)
    _slot_codes_loop(indices.numpy(), numel, -(-numel // max(1, codes.size)), _round_keys(seed), codes)
    return torch.from_numpy(codes)


def slot_indices(codes: Tensor, numel: int, seed: int) -> Tensor:
    """See `reference.slot_indices`."""
    indices = np.empty(codes.numel(), np.int32)
    _slot_indices_loop(codes.numpy(), numel, -(-numel // max(1, indices.size)), _round_keys(seed), indices)
    return torch.from_numpy(indices)


@compiled
def _mix(index, high, low):
    # `reference.mix`. In Numba, 32-bit integers add and multiply to 64 bits, so wrapping takes a mask here too.
    ones = np.uint64(0xFFFFFFFF)
    x = (np.uint64(index) + high) & ones
    x = ((x ^ (x >> np.uint64(16))) * np.uint64(0x7FEB352D)) & ones
    x ^= low
    x = ((x ^ (x >> np.uint64(15))) * np.uint64(0x846CA68B)) & ones
    return x ^ (x >> np.uint64(16))


@compiled
def _within(x, bound, high, low):
    return np.int64((_mix(x, high, low) * np.uint64(bound)) >> np.uint64(32))


@compiled
def _slot_of(index, slots, height, keys):
    # `reference.slot_of`. One subtraction brings the sum of two numbers below a bound back below it.
    q = index // slots
    s = index - q * slots + _within(q, slots, keys[0, 0], keys[0, 1])
    s -= slots * (s >= slots)
    q += _within(s, height, keys[1, 0], keys[1, 1])
    q -= height * (q >= height)
    s += _within(q, slots, keys[2, 0], keys[2, 1])
    return s - slots * (s >= slots), q


@compiled
def _index_of(slot, quotient, slots, height, keys):
    s = slot - _within(quotient, slots, keys[2, 0], keys[2, 1])
    s += slots * (s < 0)
    q = quotient - _within(s, height, keys[1, 0], keys[1, 1])
    q += height * (q < 0)
    s -= _within(q, slots, keys[0, 0], keys[0, 1])
    return q * slots + s + slots * (s < 0)


@compiled
def _hashed_slots_loop(table, indices, priorities, height, keys):
    for i in range(indices.size):
        if indices[i] >= 0:
            slot, _ = _slot_of(np.int64(indices[i]), table.size, height, keys)
            table[slot] = max(table[slot], np.int64(priorities[i]) << 32 | np.int64(indices[i]))


@compiled
def _each_hashed_loop(vectors, lengths, ends, places, keys, indices, priorities, out, values):
    for at in range(lengths.size):
        slots = out[places[at] : places[at + 1]]
        table, height = np.full(slots.size, -1, np.int64), -(-lengths[at] // max(1, slots.size))
        here, there = indices[ends[at] : ends[at + 1]], priorities[ends[at] : ends[at + 1]]
        _hashed_slots_loop(table, here, there, height, keys[at])
        x, elements = vector(vectors[at, 0], lengths[at], values), values[places[at] : places[at + 1]]
        for slot in range(slots.size):
            slots[slot] = np.int32(table[slot] & 0xFFFFFFFF)
            elements[slot] = x[slots[slot]] if table[slot] >= 0 else 0


@compiled
def _slots_loop(indices, slots, height, keys, slot, quotient):
    for i in range(indices.size):
        slot[i], quotient[i] = _slot_of(np.int64(indices[i]), slots, height, keys)


@compiled
def _indices_loop(slot, quotient, slots, height, keys, indices):
    for i in range(slot.size):
        indices[i] = _index_of(np.int64(slot[i]), np.int64(quotient[i]), slots, height, keys)


@compiled
def _slot_codes_loop(indices, numel, height, keys, codes):
    for place in range(indices.size):
        index = np.int64(indices[place])
        codes[place] = height if index == numel - 1 else -1
        if 0 <= index < numel:
            slot, quotient = _slot_of(index, indices.size, height, keys)
            if slot == place:
                codes[place] = quotient


@compiled
def _slot_indices_loop(codes, numel, height, keys, indices):
    for place in range(codes.size):
        code = np.int64(codes[place])
        indices[place] = numel - 1 if code == height else -1
        if 0 <= code < height:
            index = _index_of(place, code, codes.size, height, keys)
            if index < numel:
                indices[place] = index


@exactly
def draw(index, high, low):
    """`reference.mix` on 32-bit keys. To hash index + offset, add the offset to the high key."""
    # Because every step is cut to 32 bits, LLVM computes in 32 bits, and in vectors.
    x = np.uint32(np.uint32(index) + high)
    x = np.uint32((x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D))
    x = np.uint32(x ^ low)
    x = np.uint32((x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B))
    return np.uint32(x ^ (x >> np.uint32(16)))

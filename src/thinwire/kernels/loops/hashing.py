"""A hash of indices, and a table of slots."""

import numpy as np

from thinwire.kernels.loops.compiled import compiled


@compiled
def mix(index, high, low):
    # reference.mix: in Numba, 32-bit integers add and multiply to 64 bits, so wrapping takes a mask here too.
    ones = np.uint64(0xFFFFFFFF)
    x = (np.uint64(index) + high) & ones
    x = ((x ^ (x >> np.uint64(16))) * np.uint64(0x7FEB352D)) & ones
    x ^= low
    x = ((x ^ (x >> np.uint64(15))) * np.uint64(0x846CA68B)) & ones
    return x ^ (x >> np.uint64(16))


@compiled
def within(x, bound, high, low):
    return np.int64((mix(x, high, low) * np.uint64(bound)) >> np.uint64(32))


@compiled
def slot_of(index, slots, height, keys):
    # reference.slot_of: the sum of two numbers below a bound is brought below it by one subtraction.
    q = index // slots
    s = index - q * slots + within(q, slots, keys[0, 0], keys[0, 1])
    s -= slots * (s >= slots)
    q += within(s, height, keys[1, 0], keys[1, 1])
    q -= height * (q >= height)
    s += within(q, slots, keys[2, 0], keys[2, 1])
    return s - slots * (s >= slots), q


@compiled
def index_of(slot, quotient, slots, height, keys):
    s = slot - within(quotient, slots, keys[2, 0], keys[2, 1])
    s += slots * (s < 0)
    q = quotient - within(s, height, keys[1, 0], keys[1, 1])
    q += height * (q < 0)
    s -= within(q, slots, keys[0, 0], keys[0, 1])
    return q * slots + s + slots * (s < 0)


@compiled
def hashed_slots(table, indices, priorities, height, keys):
    for i in range(indices.size):
        if indices[i] >= 0:
            slot, _ = slot_of(np.int64(indices[i]), table.size, height, keys)
            table[slot] = max(table[slot], np.int64(priorities[i]) << 32 | np.int64(indices[i]))


@compiled
def slots_of(indices, slots, height, keys, slot, quotient):
    for i in range(indices.size):
        slot[i], quotient[i] = slot_of(np.int64(indices[i]), slots, height, keys)


@compiled
def indices_of(slot, quotient, slots, height, keys, indices):
    for i in range(slot.size):
        indices[i] = index_of(np.int64(slot[i]), np.int64(quotient[i]), slots, height, keys)

"""The loops behind `cpu`, compiled by Numba on first use and kept on disk.

`bits` is `out` (or the vector to select from) seen as integers, so that magnitudes compare without the sign bit and NaN
ranks highest. Each function works on elements lo to hi and returns how many it found; `indices` has room for `capacity`
and one block more, and once more than `capacity` are found nothing further is written.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

BLOCK, _PART = 64, 16

# The compiled functions take arrays of either precision, so they carry no annotations.
_compiled: Callable[..., Any] = njit(nogil=True, cache=True, fastmath={"contract"}, error_model="numpy")


@_compiled
def _largest(bits, sign):
    largest = bits[0] & sign
    for i in range(bits.size):
        largest = max(largest, bits[i] & sign)
    return largest


@_compiled
def _scan(bits, sign, threshold, base, indices, count, capacity):
    # The largest of a block vectorises, and few blocks need the second look.
    if _largest(bits, sign) < threshold or count > capacity:
        return count
    for start in range(0, bits.size, _PART):
        part = bits[start : start + _PART]
        if _largest(part, sign) >= threshold:
            for i in range(part.size):
                indices[count] = base + start + i
                count += (part[i] & sign) >= threshold
    return count


@_compiled
def select(bits, sign, threshold, lo, hi, indices, capacity):
    count = 0
    for start in range(lo, hi, BLOCK):
        block = slice(start, min(start + BLOCK, hi))
        count = _scan(bits[block], sign, threshold, start, indices, count, capacity)
    return count


@_compiled
def accumulate_select(
    bits,
    sign,
    threshold,
    lo,
    hi,
    indices,
    capacity,
    out,
    residual,
    gradient,
    scale,
):
    count = 0
    for start in range(lo, hi, BLOCK):
        block = slice(start, min(start + BLOCK, hi))
        o, r, g = out[block], residual[block], gradient[block]
        for i in range(o.size):
            o[i] = r[i] + scale * g[i]
        count = _scan(bits[block], sign, threshold, start, indices, count, capacity)
    return count


@_compiled
def momentum_select(
    bits,
    sign,
    threshold,
    lo,
    hi,
    indices,
    capacity,
    out,
    velocity_out,
    residual,
    velocity,
    gradient,
    scale,
    m,
    nesterov,
):
    count = 0
    for start in range(lo, hi, BLOCK):
        block = slice(start, min(start + BLOCK, hi))
        o, w, r, u, g = out[block], velocity_out[block], residual[block], velocity[block], gradient[block]
        for i in range(o.size):
            w[i] = m * u[i] + scale * g[i]
        if nesterov:
            for i in range(o.size):
                o[i] = r[i] + scale * g[i] + m * w[i]
        else:
            for i in range(o.size):
                o[i] = r[i] + w[i]
        count = _scan(bits[block], sign, threshold, start, indices, count, capacity)
    return count


@_compiled
def scatter_add(out, indices, values, sign):
    for i in range(indices.size):
        out[indices[i]] += sign * values[i]


@_compiled
def mask(x, indices, values):
    for i in range(indices.size):
        if values[i] != 0:
            x[indices[i]] = 0


@_compiled
def hashed_slots(table, indices, priorities, high, low):
    # reference.mix: in Numba, 32-bit integers add and multiply to 64 bits, so wrapping takes a mask here too.
    ones = np.uint64(0xFFFFFFFF)
    for i in range(indices.size):
        x = (np.uint64(indices[i]) + high) & ones
        x = ((x ^ (x >> np.uint64(16))) * np.uint64(0x7FEB352D)) & ones
        x ^= low
        x = ((x ^ (x >> np.uint64(15))) * np.uint64(0x846CA68B)) & ones
        x ^= x >> np.uint64(16)
        slot = np.int64((x * np.uint64(table.size)) >> np.uint64(32))
        table[slot] = max(table[slot], np.int64(priorities[i]) << 32 | np.int64(indices[i]))

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
def _mix(index, high, low):
    # reference.mix: in Numba, 32-bit integers add and multiply to 64 bits, so wrapping takes a mask here too.
    ones = np.uint64(0xFFFFFFFF)
    x = (np.uint64(index) + high) & ones
    x = ((x ^ (x >> np.uint64(16))) * np.uint64(0x7FEB352D)) & ones
    x ^= low
    x = ((x ^ (x >> np.uint64(15))) * np.uint64(0x846CA68B)) & ones
    return x ^ (x >> np.uint64(16))


@_compiled
def hashed_slots(table, indices, priorities, high, low):
    for i in range(indices.size):
        slot = np.int64((_mix(indices[i], high, low) * np.uint64(table.size)) >> np.uint64(32))
        table[slot] = max(table[slot], np.int64(priorities[i]) << 32 | np.int64(indices[i]))


@_compiled
def merge(keys, rows, keys_a, rows_a, keys_b, rows_b):
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


@_compiled
def sketch_insert(buckets, x, high, low):
    for i in range(x.size):
        if x[i] != 0:
            mixed = _mix(i, high, low)
            bucket = ((mixed >> np.uint64(1)) * np.uint64(buckets.size)) >> np.uint64(31)
            buckets[bucket] += -x[i] if mixed & np.uint64(1) else x[i]


@_compiled
def sketch_read(out, buckets, high, low):
    for i in range(out.size):
        mixed = _mix(i, high, low)
        value = buckets[((mixed >> np.uint64(1)) * np.uint64(buckets.size)) >> np.uint64(31)]
        out[i] = -value if mixed & np.uint64(1) else value


@_compiled
def median(out, estimates):
    rows = estimates.shape[0]
    ordered = np.empty(rows, estimates.dtype)
    for i in range(out.size):
        for j in range(rows):
            at = j
            while at > 0 and not ordered[at - 1] <= estimates[j, i]:
                ordered[at] = ordered[at - 1]
                at -= 1
            ordered[at] = estimates[j, i]
        out[i] = (ordered[(rows - 1) // 2] + ordered[rows // 2]) / 2


@_compiled
def pack_bits(codes, bits, lo, hi, out):
    # From a multiple of 32 codes on, a 32-bit word begins with a code.
    low = np.uint64((1 << bits) - 1)
    word, filled, place = np.uint64(0), 0, lo // 32 * bits
    for i in range(lo, hi):
        word |= (np.uint64(codes[i]) & low) << np.uint64(filled)
        filled += bits
        if filled >= 32:
            out[place] = np.uint32(word & np.uint64(0xFFFFFFFF))
            word >>= np.uint64(32)
            filled -= 32
            place += 1
    if filled:
        out[place] = np.uint32(word)


@_compiled
def unpack_bits(buffer, bits, lo, hi, out):
    low = np.uint64((1 << bits) - 1)
    word, filled, place = np.uint64(0), 0, lo // 8 * bits
    for i in range(lo, hi):
        while filled < bits:
            word |= np.uint64(buffer[place]) << np.uint64(filled)
            filled += 8
            place += 1
        out[i] = np.int16(word & low)
        word >>= np.uint64(bits)
        filled -= bits

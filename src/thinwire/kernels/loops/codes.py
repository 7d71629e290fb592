"""Numbers as codes of a few bits, and back, from elements lo to hi.

Every element's code is computed without a branch, so that the loops over a group vectorise. What is random draws from
`draw`, in 32 bits.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

# Codes equal those of the reference bit by bit, so nothing is contracted.
exactly: Callable[..., Any] = njit(nogil=True, cache=True, error_model="numpy")


@exactly
def draw(index, high, low):
    # hashing.mix on 32-bit keys: what is cut to 32 bits at every step LLVM computes in 32 bits. An index that is not
    # counted from 0 has its offset in the key, to which it is added.
    x = np.uint32(np.uint32(index) + high)
    x = np.uint32((x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D))
    x = np.uint32(x ^ low)
    x = np.uint32((x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B))
    return np.uint32(x ^ (x >> np.uint32(16)))


@exactly
def _cut(magnitude, shift):
    # A shift by less than 32, as LLVM is told here, needs no 64 bits.
    return np.int32(np.uint32(magnitude) >> (np.uint32(shift) & np.uint32(31)))


@exactly
def _uniform(noise):
    return np.float32(np.int32(noise >> np.uint32(8))) * np.float32(2.0**-24)


@exactly
def _inverse(scale):
    # That of a power of two is exact, and so is every product with it that a quotient would be.
    return np.float32(np.float32(1) / scale)


@exactly
def span(group, g, lo, hi):
    return max(lo, g * group), min(hi, (g + 1) * group)


@exactly
def _numbered(rounded, negative, base, positives, negatives):
    # 32-bit numbers add to 64 bits in Numba, so every sum is cut to 32 again.
    index = max(np.int32(rounded - base + 1), np.int32(0))
    below = np.int32(min(index, negatives) + positives) if index > 0 else np.int32(0)
    return below if negative else min(index, positives)


@exactly
def _offset(codes, x, inverse, grid, half, first):
    shift, base, positives, negatives = grid
    for i in range(x.size):
        ratio = np.float32(x[i] * inverse)
        bits = np.float32(ratio).view(np.int32)
        magnitude = np.int32(bits & np.int32(0x7FFFFFFF))
        rounded = _cut(np.int32(magnitude + half), shift)
        rounded = max(rounded, base if magnitude >= first else np.int32(0))
        codes[i] = _numbered(rounded, bits < 0, base, positives, negatives)


@exactly
def offset_encode(codes, x, scales, group, lo, hi, grid, half, first):
    for g in range(lo // group, -(-hi // group)):
        start, stop = span(group, g, lo, hi)
        if np.isnan(scales[g]):
            codes[start:stop] = 0
        else:
            _offset(codes[start:stop], x[start:stop], _inverse(scales[g]), grid, half, first)


@exactly
def _offset_stochastic(codes, x, inverse, grid, smallest, high, low):
    shift, base, positives, negatives = grid
    last = np.int32((np.int32(1) << shift) - 1)
    for i in range(x.size):
        ratio = np.float32(x[i] * inverse)
        bits = np.float32(ratio).view(np.int32)
        magnitude = np.int32(bits & np.int32(0x7FFFFFFF))
        noise = draw(i, high, low)
        rounded = _cut(np.int32(magnitude + np.int32(np.int32(noise) & last)), shift)
        upwards = base if _uniform(noise) * smallest < abs(ratio) else np.int32(0)
        rounded = upwards if abs(ratio) < smallest else rounded
        codes[i] = _numbered(rounded, bits < 0, base, positives, negatives)


@exactly
def offset_encode_stochastic(codes, x, scales, group, lo, hi, grid, smallest, high, low):
    for g in range(lo // group, -(-hi // group)):
        start, stop = span(group, g, lo, hi)
        if np.isnan(scales[g]):
            codes[start:stop] = 0
        else:
            part, out = x[start:stop], codes[start:stop]
            _offset_stochastic(out, part, _inverse(scales[g]), grid, smallest, np.uint32(high + start), low)


@exactly
def _levels(codes, x, scale, levels, high, low):
    for i in range(x.size):
        exact = min(max(x[i] / scale * levels, -levels), levels)
        lower = np.floor(exact)
        upwards = _uniform(draw(i, high, low)) < exact - lower
        codes[i] = np.int32(lower + levels) + np.int32(upwards)


@exactly
def levels_encode(codes, x, scales, group, lo, hi, levels, high, low):
    for g in range(lo // group, -(-hi // group)):
        start, stop = span(group, g, lo, hi)
        if np.isnan(scales[g]):
            codes[start:stop] = 0
        else:
            _levels(codes[start:stop], x[start:stop], scales[g], levels, np.uint32(high + start), low)


@exactly
def _ternary(codes, x, scale, high, low):
    for i in range(x.size):
        chosen = _uniform(draw(i, high, low)) * scale < abs(x[i])
        codes[i] = np.int32(chosen) << np.int32(x[i] < 0)


@exactly
def ternary_encode(codes, x, scales, group, lo, hi, high, low):
    # With a scale that is NaN nothing is chosen.
    for g in range(lo // group, -(-hi // group)):
        start, stop = span(group, g, lo, hi)
        _ternary(codes[start:stop], x[start:stop], scales[g], np.uint32(high + start), low)


@exactly
def sign_encode(codes, x):
    for i in range(x.size):
        codes[i] = x[i] < 0


@exactly
def _decode(out, codes, table, last, scale):
    for i in range(codes.size):
        out[i] = table[np.uint32(codes[i]) & last] * scale


@exactly
def table_decode(out, codes, table, scales, group, lo, hi):
    last = np.uint32(table.size - 1)
    for g in range(lo // group, -(-hi // group)):
        start, stop = span(group, g, lo, hi)
        _decode(out[start:stop], codes[start:stop], table, last, scales[g])

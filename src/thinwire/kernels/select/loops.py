"""Picking large magnitudes, from elements lo to hi.

`bits` are a vector's elements viewed as integers. With the sign bit masked off they compare like magnitudes, and NaN
ranks highest. `indices` and `found` (the bits there) have room for one more than `capacity`; once that is full, nothing
more is written. `peaks` takes the largest magnitudes' bits. The functions that select return how many they found.
"""

import numpy as np

from thinwire.kernels import simd
from thinwire.kernels.compiled import compiled

BLOCK = simd.BLOCK


@compiled
def select(bits, sign, threshold, lo, hi, indices, found, capacity, peaks):
    count, rest = 0, lo + (hi - lo) // BLOCK * BLOCK
    for start in range(lo, rest, BLOCK):
        hits = simd.look(bits, peaks, start, threshold)
        while hits and count <= capacity:
            at = start + np.int64(simd.lowest(hits))
            indices[count], found[count] = at, bits[at]
            count += 1
            hits &= hits - np.uint64(1)
    return count + _rest(bits, sign, threshold, rest, hi, indices[count:], found[count:], capacity - count, peaks)


@compiled
def _rest(bits, sign, threshold, lo, hi, indices, found, capacity, peaks):
    count = 0
    for i in range(lo, hi):
        peaks[0] = max(peaks[0], bits[i] & sign)
        if (bits[i] & sign) >= threshold and count <= capacity:
            indices[count], found[count] = i, bits[i]
            count += 1
    return count


@compiled
def accumulate_select(
    bits, sign, threshold, lo, hi, indices, found, capacity, peaks, stream, out, residual, gradient, scale
):
    count, rest, numbers = 0, lo + (hi - lo) // BLOCK * BLOCK, found.view(out.dtype)
    for start in range(lo, rest, BLOCK):
        if stream:
            hits = simd.accumulate_streaming(out, peaks, residual, gradient, start, threshold, scale)
        else:
            hits = simd.accumulate(out, peaks, residual, gradient, start, threshold, scale)
        while hits and count <= capacity:
            at = start + np.int64(simd.lowest(hits))
            # Computed again, because a streamed result is not in the cache.
            indices[count], numbers[count] = at, residual[at] + scale * gradient[at]
            count += 1
            hits &= hits - np.uint64(1)
    for i in range(rest, hi):
        out[i] = residual[i] + scale * gradient[i]
    return count + _rest(bits, sign, threshold, rest, hi, indices[count:], found[count:], capacity - count, peaks)


@compiled
def fading_select(
    bits, sign, threshold, lo, hi, indices, found, capacity, peaks, stream, out, residual, gradient, scale, decay
):
    count, rest, numbers = 0, lo + (hi - lo) // BLOCK * BLOCK, found.view(out.dtype)
    for start in range(lo, rest, BLOCK):
        if stream:
            hits = simd.fade_streaming(out, peaks, residual, gradient, start, threshold, scale, decay)
        else:
            hits = simd.fade(out, peaks, residual, gradient, start, threshold, scale, decay)
        while hits and count <= capacity:
            indices[count] = start + np.int64(simd.lowest(hits))
            count += 1
            hits &= hits - np.uint64(1)
    for i in range(rest, hi):
        out[i] = decay * residual[i] + scale * gradient[i]
    for i in range(min(count, capacity + 1)):
        numbers[i] = out[indices[i]]
    return count + _rest(bits, sign, threshold, rest, hi, indices[count:], found[count:], capacity - count, peaks)


@compiled
def momentum_select(
    bits,
    sign,
    threshold,
    lo,
    hi,
    indices,
    found,
    capacity,
    peaks,
    stream,
    out,
    moving,
    residual,
    velocity,
    gradient,
    scale,
    m,
    nesterov,
):
    count, rest, numbers = 0, lo + (hi - lo) // BLOCK * BLOCK, found.view(out.dtype)
    for start in range(lo, rest, BLOCK):
        if nesterov and stream:
            hits = simd.nesterov_streaming(out, moving, peaks, residual, velocity, gradient, start, threshold, scale, m)
        elif nesterov:
            hits = simd.nesterov(out, moving, peaks, residual, velocity, gradient, start, threshold, scale, m)
        elif stream:
            hits = simd.momentum_streaming(out, moving, peaks, residual, velocity, gradient, start, threshold, scale, m)
        else:
            hits = simd.momentum(out, moving, peaks, residual, velocity, gradient, start, threshold, scale, m)
        while hits and count <= capacity:
            at = start + np.int64(simd.lowest(hits))
            indices[count] = at
            count += 1
            hits &= hits - np.uint64(1)
    for i in range(rest, hi):
        moving[i] = m * velocity[i] + scale * gradient[i]
        out[i] = residual[i] + scale * gradient[i] + m * moving[i] if nesterov else residual[i] + moving[i]
    for i in range(min(count, capacity + 1)):
        numbers[i] = out[indices[i]]
    return count + _rest(bits, sign, threshold, rest, hi, indices[count:], found[count:], capacity - count, peaks)


@compiled
def histogram(bits, sign, shift, lo, hi, counts):
    # Four tables, because adding to one place twice in a row stalls.
    for i in range(lo, hi):
        counts[i & 3, (bits[i] & sign) >> shift] += 1


@compiled
def digits(bits, sign, shift, known, mask, counts):
    # Among magnitudes whose digits under the mask are `known`, counts how often each next digit occurs.
    for i in range(bits.size):
        magnitude = bits[i] & sign
        counts[(magnitude >> shift) & 2047] += (magnitude & mask) == known


@compiled
def kth(bits, sign, k):
    # The k-th largest magnitude, digit by digit, and how many of its equals are among the k.
    counts = np.empty(1 << 11, np.int64)
    shift, known, mask = 8 * bits.itemsize - 12, 0, 0
    while True:
        counts[:] = 0
        digits(bits, sign, shift, known, mask, counts)
        digit = 2047
        while counts[digit] < k:
            k -= counts[digit]
            digit -= 1
        known, mask = known | digit << shift, mask | 2047 << shift
        if shift == 0:
            return known, k
        shift = max(shift - 11, 0)


@compiled
def tally(bits, sign, bar):
    above = ties = 0
    for i in range(bits.size):
        above += (bits[i] & sign) > bar
        ties += (bits[i] & sign) == bar
    return above, ties


@compiled
def take(indices, bits, sign, bar, ties, out):
    # All above the bar, and the first `ties` that equal it.
    count = 0
    for i in range(bits.size):
        magnitude = bits[i] & sign
        tied = magnitude == bar and ties > 0
        ties -= tied
        if tied or magnitude > bar:
            out[count] = indices[i]
            count += 1

"""Picking large magnitudes, from elements lo to hi.

`indices`, and `found` for the bits there, have room for `capacity` and one block more; once more than `capacity` are
found nothing further is written. Each function returns how many it found and the largest magnitude's bits.
"""

import numpy as np

from thinwire.kernels.loops import lanes
from thinwire.kernels.loops.compiled import compiled

BLOCK = lanes.BLOCK
_PART = 16


@compiled
def _largest(bits, sign):
    largest = bits[0] & sign
    for i in range(bits.size):
        largest = max(largest, bits[i] & sign)
    return largest


@compiled
def _pick(bits, sign, threshold, base, indices, found, count):
    # The largest of a part vectorises, and few parts need the second look.
    for start in range(0, bits.size, _PART):
        part = bits[start : start + _PART]
        if _largest(part, sign) >= threshold:
            for i in range(part.size):
                indices[count], found[count] = base + start + i, part[i]
                count += (part[i] & sign) >= threshold
    return count


@compiled
def select(bits, sign, threshold, lo, hi, indices, found, capacity):
    count, peak = 0, 0
    for start in range(lo, hi, BLOCK):
        block = bits[start : min(start + BLOCK, hi)]
        largest = _largest(block, sign)
        peak = max(peak, largest)
        if largest >= threshold and count <= capacity:
            count = _pick(block, sign, threshold, start, indices, found, count)
    return count, peak


@compiled
def accumulate_select(bits, sign, threshold, lo, hi, indices, found, capacity, stream, out, residual, gradient, scale):
    scratch = np.empty(BLOCK, out.dtype)
    seen = scratch.view(bits.dtype)
    count, peak, rest = 0, 0, lo + (hi - lo) // BLOCK * BLOCK
    for start in range(lo, rest, BLOCK):
        if stream:
            largest = lanes.accumulate_streaming(out, residual, gradient, scratch, start, scale)
        else:
            largest = lanes.accumulate(out, residual, gradient, scratch, start, scale)
        peak = max(peak, largest)
        if largest >= threshold and count <= capacity:
            count = _pick(seen, sign, threshold, start, indices, found, count)
    for i in range(rest, hi):
        out[i] = residual[i] + scale * gradient[i]
    more, largest = select(bits, sign, threshold, rest, hi, indices[count:], found[count:], capacity - count)
    return count + more, max(peak, largest)


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
    stream,
    out,
    velocity_out,
    residual,
    velocity,
    gradient,
    scale,
    m,
    nesterov,
):
    scratch = np.empty(BLOCK, out.dtype)
    seen = scratch.view(bits.dtype)
    count, peak, rest = 0, 0, lo + (hi - lo) // BLOCK * BLOCK
    for start in range(lo, rest, BLOCK):
        if nesterov and stream:
            largest = lanes.nesterov_streaming(
                out, velocity_out, residual, velocity, gradient, scratch, start, scale, m
            )
        elif nesterov:
            largest = lanes.nesterov(out, velocity_out, residual, velocity, gradient, scratch, start, scale, m)
        elif stream:
            largest = lanes.momentum_streaming(
                out, velocity_out, residual, velocity, gradient, scratch, start, scale, m
            )
        else:
            largest = lanes.momentum(out, velocity_out, residual, velocity, gradient, scratch, start, scale, m)
        peak = max(peak, largest)
        if largest >= threshold and count <= capacity:
            count = _pick(seen, sign, threshold, start, indices, found, count)
    for i in range(rest, hi):
        velocity_out[i] = m * velocity[i] + scale * gradient[i]
        out[i] = residual[i] + (scale * gradient[i] + m * velocity_out[i] if nesterov else velocity_out[i])
    more, largest = select(bits, sign, threshold, rest, hi, indices[count:], found[count:], capacity - count)
    return count + more, max(peak, largest)


@compiled
def histogram(bits, sign, shift, lo, hi, counts):
    # Four tables, as adding to one place twice in a row waits.
    for i in range(lo, hi):
        counts[i & 3, (bits[i] & sign) >> shift] += 1


@compiled
def kth(bits, sign, k):
    # The k-th largest magnitude, eleven bits at a time, and how many of those that equal it are among the k.
    shift, known, mask = 8 * bits.itemsize - 12, sign - sign, sign - sign
    counts = np.empty(1 << 11, np.int64)
    while True:
        counts[:] = 0
        for i in range(bits.size):
            magnitude = bits[i] & sign
            counts[(magnitude >> shift) & 2047] += (magnitude & mask) == known
        digit = 2047
        while counts[digit] < k:
            k -= counts[digit]
            digit -= 1
        known, mask = known | digit << shift, mask | 2047 << shift
        if shift == 0:
            return known, k
        shift = max(shift - 11, 0)


@compiled
def take(bits, sign, bar, ties, places):
    # All above the bar, and the first `ties` that equal it.
    count = 0
    for i in range(bits.size):
        magnitude = bits[i] & sign
        tied = magnitude == bar and ties > 0
        ties -= tied
        places[count] = i
        count += tied or magnitude > bar
    return count

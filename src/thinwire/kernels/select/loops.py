"""Picking large magnitudes, from elements lo to hi.

`bits` are a vector's elements viewed as integers. With the sign bit masked off they compare like magnitudes, and NaN
ranks highest. `indices` and `found` (the bits there) have room for one more than `capacity`; once that is full, nothing
more is written. `peaks` takes the largest magnitudes' bits. The functions that select return how many they found.
"""

import numpy as np

from thinwire.kernels import simd
from thinwire.kernels.accumulate.cpu import sum_at
from thinwire.kernels.compiled import compiled, vector

BLOCK = simd.BLOCK
_LONG = 1 << 16
"""Above it, a sample is cheaper than a pass over all."""
_FEW = 1 << 8
"""Up to it, none is left out."""


@compiled
def select(bits, sign, threshold, lo, hi, indices, found, capacity, peaks):
    # A block at a time. In most, nothing reaches the threshold, and comparing is all there is to do.
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
    # What no whole block is left for, one by one.
    count = 0
    for i in range(lo, hi):
        peaks[0] = max(peaks[0], bits[i] & sign)
        if (bits[i] & sign) >= threshold and count <= capacity:
            indices[count], found[count] = i, bits[i]
            count += 1
    return count


@compiled
def accumulate_select(
    bits, sign, threshold, lo, hi, indices, found, capacity, peaks, stream,
    out, residual, gradient, scale, decay, moving, velocity, m, ahead,
):  # fmt: skip
    # Adding and picking in one pass over memory, which is what both wait for.
    count, rest, numbers = 0, lo + (hi - lo) // BLOCK * BLOCK, found.view(out.dtype)
    for start in range(lo, rest, BLOCK):
        hits = simd.add(
            out, moving, peaks, residual, velocity, gradient, start, threshold, scale, decay, m, ahead, stream
        )
        while hits and count <= capacity:
            at = start + np.int64(simd.lowest(hits))
            indices[count] = at
            if decay is None and m is None:  # computed again, because a streamed result is not in the cache
                numbers[count] = residual[at] + scale * gradient[at]
            count += 1
            hits &= hits - np.uint64(1)
    for i in range(rest, hi):
        if m is None:
            out[i] = sum_at(residual, gradient, i, scale, decay, velocity, m, ahead)
        else:
            moving[i] = m * velocity[i] + scale * gradient[i]
            out[i] = residual[i] + moving[i] if ahead is None else residual[i] + scale * gradient[i] + ahead * moving[i]
    if decay is not None or m is not None:
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
        counts[(magnitude >> shift) & (counts.size - 1)] += (magnitude & mask) == known


@compiled
def reached(bits, sign, k):
    # A threshold that k magnitudes reach for certain and not many more, and the most that may; room for none if parts
    # are too few. It is the k-th largest of the maxima of twice as many parts: each lane of some blocks is one.
    blocks, lanes = bits.size // BLOCK, 64 // bits.itemsize
    groups = -(-2 * k // lanes)
    if not 0 < groups <= blocks:
        return bits.dtype.type(1), 0
    maxima = np.zeros(groups * lanes, bits.dtype)
    for group in range(groups):
        lane = maxima[group * lanes : (group + 1) * lanes]
        for block in range(blocks * group // groups, blocks * (group + 1) // groups):
            simd.look(bits, lane, block * BLOCK, sign)
    bar, _ = bar_of(maxima, sign, k)
    return max(bits.dtype.type(1), bits.dtype.type(bar)), min(bits.size, 4 * k + BLOCK)


@compiled
def kth(bits, sign, k):
    # The k-th largest magnitude, and how many of its equals are among the k. It is looked for among a few if it can be.
    least, room = reached(bits, sign, k) if bits.size > _FEW else (bits.dtype.type(1), 0)
    if room:
        indices, found = np.empty(room + 1, np.int32), np.empty(room + 1, bits.dtype)
        peaks = np.zeros(64 // bits.itemsize, bits.dtype)
        count = select(bits, sign, least, 0, bits.size, indices, found, room, peaks)
        if k <= count <= room:
            bits = found[:count]
    bar, ties = bar_of(bits, sign, k)
    if ties:
        return bar, ties
    low, bar = bits.dtype.type(bar), sign
    for i in range(bits.size):
        magnitude = bits[i] & sign
        bar = min(bar, magnitude if magnitude > low else sign)
    return np.int64(bar), k - tally(bits, sign, bar)[0]


@compiled
def bar_of(bits, sign, k):
    # A bar, bit by bit: the k largest are all magnitudes above it, and so many ties. Once exactly k reach a number, its
    # lower bits no longer matter.
    bar = sign & type(sign)(0)
    for shift in range(8 * bits.itemsize - 2, -1, -1):
        trial = bar | type(sign)(1) << type(sign)(shift)
        count = _reach(bits, sign, trial)
        if count == k:
            return trial - type(sign)(1), 0
        if count > k:
            bar = trial
    return bar, k - tally(bits, sign, bar)[0]


@compiled
def _reach(bits, sign, bar):
    count = np.int32(0)
    for i in range(bits.size):
        count += np.int32((bits[i] & sign) >= bar)
    return count


@compiled
def tally(bits, sign, bar):
    # How many magnitudes are above the bar, and how many equal it: pieces in parallel must know how many ties to keep.
    above = ties = 0
    for i in range(bits.size):
        above += (bits[i] & sign) > bar
        ties += (bits[i] & sign) == bar
    return above, ties


@compiled
def take(indices, bits, sign, bar, ties, out):
    # All above the bar, and the first `ties` that equal it. Each is written, and what is not kept written over, because
    # nobody can predict which are.
    count = 0
    for i in range(bits.size):
        if count == out.size:
            return
        magnitude = bits[i] & sign
        tied = (magnitude == bar) & (ties > 0)
        ties -= tied
        out[count] = indices[i]
        count += tied | (magnitude > bar)


@compiled
def take_largest(indices, bits, sign, out, found):
    # The largest, as many as `out` holds, or all, in their order; `found` takes the bits. Returns how many.
    known, ties = (0, bits.size) if bits.size <= out.size else kth(bits, sign, out.size)
    count = 0
    for i in range(bits.size if out.size else 0):
        magnitude = bits[i] & sign
        tied = magnitude == known and ties > 0
        ties -= tied
        if tied or magnitude > known:
            out[count], found[count] = indices[i], bits[i]
            count += 1
    return count


@compiled
def largest_of_each(table, lengths, starts, indices, found, sign, first, last, sampled):
    # The largest of vectors `first` to `last`, as many as there is room from one of `starts` to the next.
    peaks = np.zeros(64 // found.itemsize, found.dtype)
    for at in range(first, last):
        bits, k = vector(table[at, 0], lengths[at], found), starts[at + 1] - starts[at]
        here, there = indices[starts[at] : starts[at + 1]], found[starts[at] : starts[at + 1]]
        bar, room = _likely(bits, sign, k, sampled) if bits.size > _LONG else reached(bits, sign, k)
        picks, reaching = np.empty(room + 1, np.int32), np.empty(room + 1, found.dtype)
        count = select(bits, sign, bar, 0, bits.size, picks, reaching, room, peaks) if room else 0
        if room and k <= count <= room:
            take_largest(picks[:count], reaching[:count], sign, here, there)
        else:  # also where zeros are needed, which are not selected
            take_largest(np.arange(bits.size).astype(np.int32), bits, sign, here, there)


@compiled
def _likely(bits, sign, k, sampled):
    # A threshold that a few more than k magnitudes should reach, by four standard deviations of the sample's count, and
    # the most that may reach it; room for none if a sample is not worth while.
    stride = bits.size // sampled | 1
    sample = bits[::stride].copy()
    expected = k / max(1, bits.size) * sample.size
    rank = np.int64(np.ceil(expected + 4 * np.sqrt(expected) + 1))
    if stride == 1 or 2 * rank > sample.size:
        return bits.dtype.type(1), 0
    bar, _ = kth(sample, sign, rank)
    room = np.int64(np.ceil((rank + 4 * np.sqrt(rank)) / sample.size * bits.size))
    return max(bits.dtype.type(1), bits.dtype.type(bar)), min(bits.size, room)


@compiled
def peaks_of_each(places, lengths, peaks, sign):
    for at in range(lengths.size):
        bits = vector(places[at, 0], lengths[at], peaks)
        largest = sign & type(sign)(0)
        for i in range(bits.size):
            largest = max(largest, bits[i] & sign)
        peaks[at] = largest

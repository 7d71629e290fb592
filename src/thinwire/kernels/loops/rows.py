"""Picking large magnitudes in each row of a matrix."""

import numpy as np

from thinwire.kernels.loops.compiled import compiled


@compiled
def largest_in_rows(bits, sign, width, k, lo, hi, out):
    place = 0
    for start in range(lo, hi, width):
        row = bits[start : start + width]
        bar, ties = _kth(row, sign, k)
        for i in range(width):
            magnitude = row[i] & sign
            tied = magnitude == bar and ties > 0
            ties -= tied
            if tied or magnitude > bar:
                out[place] = start + i
                place += 1


@compiled
def _kth(row, sign, k):
    # The k-th largest magnitude bit by bit, and how many of its equals are among the k. Once just k reach a number,
    # what lies below it decides nothing any more.
    bar = sign & type(sign)(0)
    for shift in range(8 * row.itemsize - 2, -1, -1):
        trial = bar | type(sign)(1) << type(sign)(shift)
        reached = _reach(row, sign, trial)
        if reached == k:
            return trial - type(sign)(1), 0
        if reached > k:
            bar = trial
    return bar, k - _reach(row, sign, bar + type(sign)(1))


@compiled
def _reach(row, sign, bar):
    count = np.int32(0)
    for i in range(row.size):
        count += np.int32((row[i] & sign) >= bar)
    return count

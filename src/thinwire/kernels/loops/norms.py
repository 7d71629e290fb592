"""Norms of groups, from elements lo to hi."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

from thinwire.kernels.loops.codes import exactly, span

# Sums may be reordered, so that they vectorise.
_summing: Callable[..., Any] = njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract", "reassoc"})


@_summing
def _sum(x, order):
    total = 0.0
    if order == 1:
        for i in range(x.size):
            total += np.float64(abs(x[i]))
    else:
        for i in range(x.size):
            total += np.float64(x[i]) * np.float64(x[i])
    return total


@_summing
def group_sums(out, x, group, order, lo, hi):
    for g in range(lo // group, -(-hi // group)):
        start, stop = span(group, g, lo, hi)
        out[g] = _sum(x[start:stop], order)


@exactly
def _largest(bits):
    largest = np.int32(0)
    for i in range(bits.size):
        largest = max(largest, bits[i] & np.int32(0x7FFFFFFF))
    return largest


@exactly
def group_peaks(out, bits, group, lo, hi):
    for g in range(lo // group, -(-hi // group)):
        start, stop = span(group, g, lo, hi)
        out[g] = _largest(bits[start:stop])

"""Residuals of 16 bits, seen as uint16."""

import numpy as np

from thinwire.kernels.loops.compiled import compiled
from thinwire.kernels.loops.hashing import mix

_EXPONENT = np.uint32(0x7F800000)


@compiled
def accumulate_rounded(out, residual, gradient, scale, high, low, lo, hi):
    for i in range(lo, hi):
        before = np.uint32(np.uint32(residual[i]) << np.uint32(16)).view(np.float32)
        bits = np.float32(before + scale * np.float32(gradient[i])).view(np.uint32)
        finite = (bits & _EXPONENT) != _EXPONENT
        draw = np.uint32(mix(i, high, low) & np.uint64(0xFFFF)) * np.uint32(finite)
        # A NaN whose upper half is that of an infinity stays one.
        quiet = np.uint32((not finite) and (bits & np.uint32(0x7FFFFF)) != 0) << np.uint32(22)
        out[i] = np.uint16(((bits | quiet) + draw) >> np.uint32(16))

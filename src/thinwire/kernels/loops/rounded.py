"""Residuals of 16 bits, seen as uint16."""

import numpy as np

from thinwire.kernels.loops.codes import draw, exactly


@exactly
def accumulate_rounded(out, residual, gradient, scale, high, low):
    # From 0 on, so that no index is taken for one from the end, and the loop vectorises.
    for i in range(out.size):
        before = np.uint32(np.uint32(residual[i]) << np.uint32(16)).view(np.float32)
        bits = np.float32(before + np.float32(scale * gradient[i])).view(np.uint32)
        rounded = np.uint32(np.uint32(bits + np.uint32(draw(i, high, low) & np.uint32(0xFFFF))) >> np.uint32(16))
        # What is not finite is cut; a NaN whose upper half is that of an infinity stays one.
        quiet = np.uint32(0x40) if np.uint32(bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000) else np.uint32(0)
        cut = np.uint32(np.uint32(bits >> np.uint32(16)) | quiet)
        finite = np.uint32(bits & np.uint32(0x7F800000)) != np.uint32(0x7F800000)
        out[i] = np.uint16(rounded if finite else cut)

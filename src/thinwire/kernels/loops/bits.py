"""Codes of a few bits, laid behind one another."""

import numpy as np

from thinwire.kernels.loops.compiled import compiled


@compiled
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


@compiled
def unpack_bits(buffer, bits, lo, hi, out):
    low = np.uint64((1 << bits) - 1)
    word, filled, place = np.uint64(0), 0, lo // 8 * bits
    for i in range(lo, hi):
        while filled < bits:
            word |= np.uint64(buffer[place]) << np.uint64(filled)
            filled += 8
            place += 1
        out[i] = word & low
        word >>= np.uint64(bits)
        filled -= bits

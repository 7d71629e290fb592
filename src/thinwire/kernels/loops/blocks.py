"""Blocks of adjacent elements."""

from thinwire.kernels.loops.compiled import compiled, reordering


@reordering
def block_energies(x, width, lo, hi, out):
    # Of blocks lo to hi. Pairs are the coefficients of a Fourier transform.
    if width == 2 and 2 * hi <= x.size:
        for i in range(hi - lo):
            real, imaginary = x[2 * (lo + i)], x[2 * (lo + i) + 1]
            out[i] = real * real + imaginary * imaginary
    else:
        for i in range(hi - lo):
            total = x.dtype.type(0)
            for value in x[(lo + i) * width : min((lo + i + 1) * width, x.size)]:
                total += value * value
            out[i] = total


@compiled
def select_blocks(x, width, sign, threshold, lo, hi, indices, found, scratch, bits):
    # `bits` are those of `scratch`, in which energies are computed; `found` takes those that reach the threshold.
    count, capacity = 0, indices.size - scratch.size
    for start in range(lo, hi, scratch.size):
        several = min(scratch.size, hi - start)
        block_energies(x, width, start, start + several, scratch)
        for i in range(several if count <= capacity else 0):
            indices[count], found[count] = start + i, bits[i] & sign
            count += (bits[i] & sign) >= threshold
    return count

"""The largest magnitude of each of several vectors, in one call."""

from collections.abc import Sequence

from torch import Tensor

from thinwire.kernels.compiled import compiled
from thinwire.kernels.parts import addresses, sizes
from thinwire.kernels.select.cpu import as_integers
from thinwire.kernels.several import vector


def peak_of_each(xs: Sequence[Tensor]) -> Tensor:
    """See `reference.peak_of_each`. As integers, magnitudes of NaN are the largest."""
    peaks = xs[0].new_empty(len(xs))
    _peaks_loop(addresses(xs), sizes(xs), *as_integers(peaks))
    return peaks


@compiled
def _peaks_loop(places, lengths, peaks, sign):
    for at in range(lengths.size):
        bits = vector(places[at, 0], lengths[at], peaks)
        largest = sign & type(sign)(0)
        for i in range(bits.size):
            largest = max(largest, bits[i] & sign)
        peaks[at] = largest

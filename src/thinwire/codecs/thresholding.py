"""Estimate a threshold from a sample, and pick all elements that reach it in one pass (Lin et al. 2018).

Indices of picks (int32) ascend. A GPU fills them up with −1, so that the host need not wait for their number.
"""

import math
from abc import abstractmethod
from functools import lru_cache
from typing import ClassVar

from torch import Tensor
from typing_extensions import override

from thinwire.codecs.base import Codec, kept
from thinwire.kernels import Draw, Picks
from thinwire.payloads import Narrow, Scratch, Sparse, narrowed
from thinwire.schedules import Density
from thinwire.signals import Signal, largest, limited

# The sample holds about this many of the picks. So the number of picks varies by about 1/√80 = 11 %.
PICKS_IN_SAMPLE = 80


def draw(numel: int, picks: int, capacity: int, seed: int, first: int = 0, last: int = -1) -> Draw:
    """Return how to pick about `picks` of the largest of `numel` magnitudes, of which at most `capacity` are wanted.

    The threshold is the ⌈picks/d · s⌉-th largest of a sample of s magnitudes. The sample is evenly spaced, and `seed`
    sets where it begins.
    """
    if picks >= numel:  # everything; the smallest of a sample would leave something out
        return Draw(0, 1, 0, min(numel, capacity), first, last)
    stride = _stride(picks)
    return _drawn(numel, picks, capacity, stride, seed % min(stride, numel), first, last)


@lru_cache(maxsize=4096)
def _drawn(numel: int, picks: int, capacity: int, stride: int, offset: int, first: int, last: int) -> Draw:
    size = -(-(numel - offset) // stride)
    rank = min(size, max(1, math.ceil(picks / numel * size)))
    return Draw(offset, stride, rank, min(numel, capacity), first, last)


def _stride(picks: int) -> int:
    return max(1, picks // PICKS_IN_SAMPLE) | 1  # odd, so that it walks through all columns of a matrix


def sample_bytes(numel: int, picks: int) -> float:
    """Return what the sample of `draw` takes: numbers, their magnitudes, and what finds the threshold, 4 bytes each."""
    return 0 if picks >= numel else 12 * numel / _stride(picks)


class Thresholded(Codec):
    """Sends all `|x| ≥ τ`, where τ aims at k = round(density · d) elements, and there is room for ⌈bound · k⌉."""

    density: Density
    bound: float
    values: Narrow

    # what finds τ, and candidates, of which the payload is a part: several times as many as are sent
    scratch: ClassVar[Scratch] = Scratch(element=0.2, value=135, arriving=13)

    @override
    def encode_signal(self, signal: Signal, *, seed: int = 0) -> Sparse:
        """Return ⌈bound · k⌉ elements: the largest of those that reach τ, and padding if there are fewer."""
        k = kept(self.density, signal.numel)
        capacity = room(self.bound, k, signal.numel)
        threshold = self.threshold(signal, k)
        picks = near(signal, threshold, capacity)
        self.look(signal, threshold, picks, k)
        indices, values = limited(picks, capacity)
        values, coded = narrowed(values, self.values, signal.dtype, seed, signal.share)
        return Sparse(indices=filled(indices, signal.numel), values=values, numel=signal.numel, coded=coded)

    @abstractmethod
    def threshold(self, signal: Signal, k: int) -> Tensor:
        """Return τ (0-dim)."""

    def look(self, signal: Signal, threshold: Tensor, picks: Picks, k: int) -> None:
        """See what reached τ."""


def near(signal: Signal, threshold: Tensor, picks: int) -> Picks:
    """Return the elements that reach the threshold (0-dim), or the largest if far more than `picks` do."""
    return signal.select(threshold, min(signal.numel, 4 * picks + PICKS_IN_SAMPLE))


def filled(indices: Tensor, numel: int) -> Tensor:
    """Replace −1 by the last index. With the value 0, that is padding."""
    return indices.masked_fill(indices < 0, numel - 1)


def kth_largest(x: Tensor, k: int) -> Tensor:
    """Return the k-th largest magnitude (0-dim), for k ≤ x.numel(); 0 for none."""
    return x.index_select(0, largest(x, k)).abs().min() if k else x.new_zeros(())


def room(bound: float, k: int, numel: int) -> int:
    """Return ⌈bound · k⌉, or `numel` if that is less."""
    return min(numel, math.ceil(bound * k))

"""Top-k with a threshold estimated from a sample, as Deep Gradient Compression selects (Lin et al. 2018)."""

import math
from dataclasses import dataclass
from typing import final

from thinwire.checked import Multiple, checked
from thinwire.codecs.base import Codec, kept
from thinwire.codecs.thresholding import candidates, strongest
from thinwire.payloads import Narrow, Sparse
from thinwire.schedules import Density
from thinwire.signals import Signal


@final
@checked
@dataclass(frozen=True, kw_only=True)
class SampledThreshold(Codec):
    """Send k = round(density · d) of the largest magnitudes, found with a threshold estimated from a sample.

    The threshold aims at `surplus` · k elements. If k or more elements reach it, the k largest are sent: exactly the
    Top-k. If fewer do, the rest of the payload is padding: the last index, value 0. Raises ValueError for a density
    outside (0, 1] or a surplus below 1.
    """

    density: Density
    surplus: Multiple = 1.25
    values: Narrow = None

    def encode_signal(self, signal: Signal, *, seed: int = 0) -> Sparse:
        """Return k elements, padding included. NaN counts as largest."""
        k = kept(self.density, signal.numel)
        picks = candidates(signal, min(signal.numel, math.ceil(self.surplus * k)), seed)
        return strongest(signal, picks, k, self.values, seed)

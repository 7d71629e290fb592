"""Top-k with a threshold estimated from a sample."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from thinwire.checked import Multiple, checked
from thinwire.codecs.base import BucketCodec, fit, kept, side_by_side
from thinwire.codecs.thresholding import draw, sample_bytes
from thinwire.kernels import Draw
from thinwire.kernels.parts import Cut
from thinwire.kernels.replay import changing
from thinwire.payloads import Narrow, Scratch, Sparse
from thinwire.schedules import Density
from thinwire.signals import Signals


@final
@checked
@dataclass(frozen=True, kw_only=True)
class SampledThreshold(BucketCodec):
    """Send k = round(density · d) of the largest magnitudes, found by a sampled threshold (Lin et al. 2018).

    Args:
        density: The share of elements to send.
        surplus: The threshold aims at surplus · k elements. If k or more reach it, the k largest are sent: exactly the
            Top-k. If fewer do, the rest of the payload is padding: the last index, value 0.
        values: How values travel: in the gradient's dtype (None), in another dtype, or in a format of a few bits.
    """

    density: Density
    surplus: Multiple = 1.25
    values: Narrow = None

    @property
    def scratch(self) -> Scratch:
        """A sample, candidates, and the payload."""
        return Scratch(value=60, alone=lambda numel: sample_bytes(numel, self._picks(kept(self.density, numel))))

    def _picks(self, k: int) -> int:
        return math.ceil(self.surplus * k)

    def encode_signals(self, signals: Signals, *, seeds: Sequence[int], cut: Cut, numel: int) -> Sparse:
        """Return k elements, padding included. NaN counts as largest."""
        counts = [kept(self.density, length) for length in signals.lengths]

        def draws() -> list[Draw]:
            each = zip(counts, seeds, cut.regions, strict=True)
            return [draw(n, self._picks(k), k, seed, first, first + n - 1) for k, seed, (first, n) in each]

        found = signals.pick(changing(draws, len(counts)), fit(signals, self.values))
        return side_by_side(signals, found, counts, self.values, seeds=seeds, cut=cut, numel=numel)

"""Exact Top-k: the largest magnitudes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

from thinwire.checked import checked
from thinwire.codecs.base import BucketCodec, fit, kept, side_by_side
from thinwire.kernels.parts import Cut
from thinwire.payloads import Narrow, Scratch, Sparse
from thinwire.schedules import Density
from thinwire.signals import Signals


@final
@checked
@dataclass(frozen=True, kw_only=True)
class TopK(BucketCodec):
    """Send the k = round(density · d) largest magnitudes, exactly (Stich et al. 2018).

    Args:
        density: The share of elements to send.
        values: How values travel: in the gradient's dtype (None), in another dtype, or in a format of a few bits.
    """

    density: Density
    values: Narrow = None

    scratch: ClassVar[Scratch] = Scratch(element=0.3, value=10)  # candidates, and the payload

    def encode_signals(self, signals: Signals, *, seeds: Sequence[int], cut: Cut, numel: int) -> Sparse:
        """Return k elements. NaN counts as largest, and of equal magnitudes the lowest index comes first."""
        counts = [kept(self.density, length) for length in signals.lengths]
        found = signals.largest(counts, cut.offsets, fit(signals, self.values))
        return side_by_side(signals, found, counts, self.values, seeds=seeds, cut=cut, numel=numel)

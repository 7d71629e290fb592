"""Exact Top-k: the largest magnitudes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from thinwire import kernels
from thinwire.checked import checked
from thinwire.codecs.base import Codec, kept
from thinwire.codecs.thresholding import side_by_side
from thinwire.payloads import Narrow, Scratch, Sparse
from thinwire.schedules import Density
from thinwire.signals import Signal, computed, wide_each


@final
@checked
@dataclass(frozen=True, kw_only=True)
class TopK(Codec):
    """Send the k = round(density · d) largest magnitudes, exactly. `values` narrows the numbers on the wire.

    Raises ValueError for a density outside (0, 1].
    """

    density: Density
    values: Narrow = None

    @property
    def scratch(self) -> Scratch:
        """Candidates, and the payload."""
        return Scratch(element=0.45, value=10)

    def encode_signal(self, signal: Signal, *, seed: int = 0) -> Sparse:
        """Return k elements. NaN counts as largest, and of equal magnitudes the lowest index comes first."""
        return self.encode_signals([signal], seeds=[seed], offsets=[0], numel=signal.numel)

    def encode_signals(
        self, signals: Sequence[Signal], *, seeds: Sequence[int], offsets: Sequence[int], numel: int
    ) -> Sparse:
        """Return the same of each. All are searched in one call."""
        counts = [kept(self.density, signal.numel) for signal in signals]
        found = kernels.largest_of_each(wide_each(computed(signals)), counts)
        return side_by_side(signals, found, counts, self.values, seeds=seeds, offsets=offsets, numel=numel)

    def contraction(self, numel: int) -> float | None:
        """δ = k/d. A vector of equal magnitudes attains it (Stich et al. 2018)."""
        return None if self.values else kept(self.density, numel) / max(1, numel)

"""Exact Top-k: the largest magnitudes."""

from dataclasses import dataclass
from typing import final

from thinwire.checked import checked
from thinwire.codecs.base import Codec, kept
from thinwire.codecs.thresholding import largest
from thinwire.payloads import Narrow, Sparse, narrowed
from thinwire.schedules import Density
from thinwire.signals import Signal


@final
@checked
@dataclass(frozen=True, kw_only=True)
class TopK(Codec):
    """Send the k = round(density · d) largest magnitudes, exactly. `values` narrows the numbers on the wire.

    Raises ValueError for a density outside (0, 1].
    """

    density: Density
    values: Narrow = None

    def encode_signal(self, signal: Signal, *, seed: int = 0) -> Sparse:
        """Return k elements. NaN counts as largest, and of equal magnitudes the lowest index comes first."""
        x = signal.tensor()
        indices = largest(x, kept(self.density, signal.numel))
        values, coded = narrowed(x.index_select(0, indices), self.values, signal.dtype, seed, signal.share)
        return Sparse(indices=indices, values=values, numel=signal.numel, coded=coded)

    def contraction(self, numel: int) -> float | None:
        """δ = k/d. A vector of equal magnitudes attains it (Stich et al. 2018)."""
        return None if self.values else kept(self.density, numel) / max(1, numel)

"""The largest magnitudes, exactly."""

from dataclasses import dataclass
from typing import final

from thinwire.codecs.base import Codec, check_density, kept
from thinwire.codecs.thresholding import largest
from thinwire.payloads import Narrow, Sparse, narrowed
from thinwire.schedules import Schedule
from thinwire.signals import Signal


@final
@dataclass(frozen=True, kw_only=True)
class TopK(Codec):
    """Send the k = round(density · d) largest magnitudes. `values` narrows the numbers on the wire."""

    density: float | Schedule
    values: Narrow = None

    def __post_init__(self) -> None:
        check_density(self.density)

    def encode_signal(self, signal: Signal, *, seed: int = 0) -> Sparse:
        """Return k elements; NaN counts as largest, and of equal ones the lowest index comes first."""
        x = signal.tensor()
        indices = largest(x, kept(self.density, signal.numel))
        values, coded = narrowed(x.index_select(0, indices), self.values, signal.dtype, seed, signal.share)
        return Sparse(indices=indices, values=values, numel=signal.numel, coded=coded)

    def contraction(self, numel: int) -> float | None:
        """δ = k/d, attained by a vector of equal magnitudes (Stich et al. 2018)."""
        return None if self.values else kept(self.density, numel) / max(1, numel)

"""No compression: send every value."""

from dataclasses import dataclass
from typing import final

from thinwire.codecs.base import Codec
from thinwire.payloads import Dense, Scratch, narrowed
from thinwire.signals import Signal


@final
@dataclass(frozen=True, kw_only=True)
class Identity(Codec):
    """Send every value as it is."""

    @property
    def scratch(self) -> Scratch:
        """Nothing: the gradient is the payload."""
        return Scratch()

    @property
    def elementwise(self) -> bool:
        """Yes."""
        return True

    def encode_signal(self, signal: Signal, *, seed: int = 0) -> Dense:
        """Return all values, in the gradient's dtype."""
        values, _ = narrowed(signal.tensor(), None, signal.dtype, seed, signal.share)
        return Dense(values=values)

    def contraction(self, numel: int) -> float | None:
        """δ = 1, because nothing is lost."""
        return 1.0

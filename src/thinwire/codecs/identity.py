"""No compression: send every value."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch

from thinwire.codecs.base import Codec
from thinwire.payloads import Dense, Scratch, narrowed
from thinwire.signals import Signal, computed


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
        return self.encode_signals([signal], seeds=[seed], offsets=[0], numel=signal.numel)

    def encode_signals(
        self, signals: Sequence[Signal], *, seeds: Sequence[int], offsets: Sequence[int], numel: int
    ) -> Dense:
        """Return all values of each, side by side. Small vectors are computed in one call."""
        parts = [
            narrowed(x, None, signal.dtype, seed, signal.share)[0]  # one by one: what that takes is the longest's
            for x, signal, seed in zip(computed(signals), signals, seeds, strict=True)
        ]
        values = parts[0] if len(parts) == 1 else torch.cat(parts)
        regions = tuple((offset, signal.numel) for offset, signal in zip(offsets, signals, strict=True))
        return Dense(values=values, numel=numel, regions=regions)

    def contraction(self, numel: int) -> float | None:
        """δ = 1, because nothing is lost."""
        return 1.0

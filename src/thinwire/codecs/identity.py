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
        like, vectors = signals[0], computed(signals)
        values, _ = narrowed(
            vectors[0] if len(vectors) == 1 else torch.cat(vectors), None, like.dtype, seeds[0], like.share
        )
        regions = tuple((offset, signal.numel) for offset, signal in zip(offsets, signals, strict=True))
        return Dense(values=values, numel=numel, regions=regions)

    def contraction(self, numel: int) -> float | None:
        """δ = 1, because nothing is lost."""
        return 1.0

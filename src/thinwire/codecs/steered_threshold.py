"""A threshold that follows the wanted density without sorting."""

import math
from dataclasses import dataclass
from typing import final

import torch

from thinwire.codecs.base import Codec, check_density, kept
from thinwire.codecs.thresholding import check_bound, kth_largest, padded, reaching, room
from thinwire.payloads import Narrow, Sparse
from thinwire.schedules import Schedule
from thinwire.signals import Signal


@final
@dataclass(frozen=True, kw_only=True)
class SteeredThreshold(Codec):
    """Send all |x| ≥ τ; where n were sent instead of k = round(density · d), τ ← τ · (1 + ln(n/k) / ln(d/k)).

    The step is exact where magnitudes follow an exponential law (values a Laplace law). τ is kept in the memory's note,
    starts at the k-th largest magnitude, and goes back to it where more than ⌈bound · k⌉ would be sent. Fewer leave
    padding.
    """

    density: float | Schedule
    bound: float = 1.5
    values: Narrow = None

    def __post_init__(self) -> None:
        check_density(self.density)
        check_bound(self.bound)

    def encode_signal(self, signal: Signal, *, seed: int = 0) -> Sparse:
        """Return ⌈bound · k⌉ elements, padding included."""
        k = kept(self.density, signal.numel)
        capacity = room(self.bound, k, signal.numel)
        note = None if signal.note is None else signal.note.read()
        threshold = float(note) if note is not None else kth_largest(signal.tensor(), k) if k else 0.0
        indices = reaching(signal, threshold, capacity)
        values = signal.tensor().index_select(0, indices)
        if signal.note is not None and k:
            at_bound = indices.numel() == capacity
            after = float(values.abs().min()) if at_bound else threshold * self._step(indices.numel(), k, signal.numel)
            signal.note.write(torch.tensor([after], device=signal.device))
        return padded(indices, values, capacity, signal, self.values, seed)

    def _step(self, found: int, k: int, numel: int) -> float:
        if k == numel:
            return 1.0
        return max(0.5, 1 + math.log(max(found, 0.5) / k) / math.log(numel / k))

"""A threshold that is steered towards the wanted density, without sorting."""

import math
from dataclasses import dataclass
from typing import Annotated, final

import torch
from torch import Tensor
from typing_extensions import override

from thinwire.checked import Multiple, Range, checked
from thinwire.codecs.thresholding import Thresholded, kth_largest
from thinwire.kernels import Picks
from thinwire.payloads import Narrow
from thinwire.schedules import Density
from thinwire.signals import Signal

Gain = Annotated[float, Range("a gain, above 0 and at most 1", above=0, most=1)]


@final
@checked
@dataclass(frozen=True, kw_only=True)
class SteeredThreshold(Thresholded):
    """Send all `|x| ≥ τ`, and steer τ so that k = round(density · d) elements reach it.

    If n reached it, τ ← τ · (1 + gain · ln(n/k) / ln(d/k)). τ is kept in the memory's note, and starts at the k-th
    largest magnitude.

    Args:
        density: The share k/d of elements that τ aims at.
        bound: The payload has room for ⌈bound · k⌉ elements. If more reach τ, the largest are sent. If fewer do, the
            rest is padding.
        gain: 1 is exact where values follow a Laplace law. With error feedback, residuals pile up just below τ; a
            smaller gain is then steadier.
        values: How values travel: in the gradient's dtype (None), in another dtype, or in a format of a few bits.
    """

    density: Density
    bound: Multiple = 1.5
    gain: Gain = 0.25
    values: Narrow = None

    @override
    def threshold(self, signal: Signal, k: int) -> Tensor:
        note = None if signal.note is None else signal.note.read()
        return kth_largest(signal.tensor(), k) if note is None else note[0]

    @override
    def look(self, signal: Signal, threshold: Tensor, picks: Picks, k: int) -> None:
        if signal.note is not None and k:
            signal.note.write((threshold * self._step((picks.indices >= 0).sum(), k, signal.numel)).view(1))

    def _step(self, found: Tensor, k: int, numel: int) -> Tensor:
        if k == numel:
            return torch.ones_like(found)
        step = 1 + self.gain * torch.log(found.clamp(min=0.5) / k) / math.log(numel / k)
        return step.clamp(0.5, 2.0)

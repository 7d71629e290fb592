"""A threshold from the mean magnitude."""

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from thinwire.checked import Multiple, checked
from thinwire.codecs.base import Codec, kept
from thinwire.codecs.thresholding import near, room, strongest
from thinwire.payloads import Narrow, Sparse
from thinwire.schedules import Density
from thinwire.signals import Signal


@final
@checked
@dataclass(frozen=True, kw_only=True)
class LaplaceThreshold(Codec):
    """Send all `|x| ≥ τ` = b · ln(d/k) with b the mean magnitude: no sort, no state (Gupta et al. 2021, Appendix B).

    If values follow a Laplace law, k = round(density · d) elements reach τ. Heavier tails send more at low density and
    fewer at high density.

    Args:
        density: The share k/d of elements that τ aims at.
        bound: The payload has room for ⌈bound · k⌉ elements. If more reach τ, the largest are sent. If fewer do, the
            rest is padding.
        values: How values travel: in the gradient's dtype (None), in another dtype, or in a format of a few bits.
    """

    density: Density
    bound: Multiple = 2.0
    values: Narrow = None

    def encode_signal(self, signal: Signal, *, seed: int = 0) -> Sparse:
        """Return ⌈bound · k⌉ elements, padding included."""
        k = kept(self.density, signal.numel)
        capacity = room(self.bound, k, signal.numel)
        mean = torch.linalg.vector_norm(signal.tensor(), 1) / max(1, signal.numel)
        picks = near(signal, mean * math.log(signal.numel / k) if k else mean, capacity)
        return strongest(signal, picks, capacity, self.values, seed)


def laplace_quantile(mean: Tensor, scale: Tensor, share: float) -> Tensor:
    """Return τ with P(|R| ≥ τ) = `share`, where R follows the Laplace law with mean μ and scale b (both 0-dim).

    Let t = e^(−2|μ|/b) and c = 1 − share. Then τ is |μ| + b · ln((1 + t) / (2 · share)) if that is |μ| or more, and
    |μ| + b · ln(c + √(c² + t)) otherwise.
    """
    center, rest, least = mean.abs(), 1 - share, torch.finfo(scale.dtype).tiny
    tail = torch.exp(-2 * center / scale.clamp(min=least))
    above, below = ((1 + tail) / (2 * share)).log(), (rest + (rest * rest + tail).sqrt()).clamp(min=least).log()
    return (center + scale * torch.where(above >= 0, above, below)).clamp(min=0)

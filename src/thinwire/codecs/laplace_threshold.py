"""A threshold from the mean magnitude."""

import math
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor
from typing_extensions import override

from thinwire.checked import Multiple, checked
from thinwire.codecs.thresholding import Thresholded
from thinwire.payloads import Narrow, Scratch
from thinwire.schedules import Density
from thinwire.signals import Signal


@final
@checked
@dataclass(frozen=True, kw_only=True)
class LaplaceThreshold(Thresholded):
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

    scratch: ClassVar[Scratch] = Scratch(longest=8, value=64)

    @override
    def threshold(self, signal: Signal, k: int) -> Tensor:
        mean = torch.linalg.vector_norm(signal.tensor(), 1) / max(1, signal.numel)
        return mean * math.log(signal.numel / k) if k else mean


def laplace_quantile(mean: Tensor, scale: Tensor, share: float) -> Tensor:
    """Return τ with P(|R| ≥ τ) = `share`, where R follows the Laplace law with mean μ and scale b (both 0-dim).

    Let t = e^(−2|μ|/b) and c = 1 − share. Then τ is |μ| + b · ln((1 + t) / (2 · share)) if that is |μ| or more, and
    |μ| + b · ln(c + √(c² + t)) otherwise.
    """
    center, rest, least = mean.abs(), 1 - share, torch.finfo(scale.dtype).tiny
    tail = torch.exp(-2 * center / scale.clamp(min=least))
    above, below = ((1 + tail) / (2 * share)).log(), (rest + (rest * rest + tail).sqrt()).clamp(min=least).log()
    return (center + scale * torch.where(above >= 0, above, below)).clamp(min=0)

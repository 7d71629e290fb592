"""Local gradient clipping, before a gradient is added to the residual (Lin et al. 2018, §3)."""

import math
from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from thinwire.waits import on_host


@final
class LocalClipping:
    """Clips each rank's gradient, per tensor, to a norm of limit/√world_size times the loss scale. None: no limit."""

    def __init__(self, limit: float | None) -> None:
        self._limit, self._loss_scale = limit, 1.0

    def limited_each(self, gradients: Sequence[Tensor], scale: float) -> tuple[Sequence[Tensor], Sequence[float]]:
        """Return gradients and factors that make the limited ones times `scale`, 1/world_size; NaN stays."""
        if self._limit is None:
            return gradients, [scale] * len(gradients)
        limit = self._limit * self._loss_scale * math.sqrt(scale)
        limited, factors = zip(*(_limited(gradient, scale, limit) for gradient in gradients), strict=True)
        return limited, factors

    def rescale(self, factor: float) -> None:
        """Follow the loss scale, which has been multiplied by `factor`."""
        self._loss_scale *= factor


def _limited(gradient: Tensor, scale: float, limit: float) -> tuple[Tensor, float]:
    norm = torch.linalg.vector_norm(gradient, dtype=torch.float64)
    if not on_host(norm):
        factor = torch.where(norm.isfinite() & (norm > limit), limit / norm, 1.0)
        return gradient * factor.to(gradient.dtype), scale
    length = float(norm)
    return gradient, scale * (limit / length if math.isfinite(length) and length > limit else 1.0)

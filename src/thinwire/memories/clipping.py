"""Local gradient clipping (Deep Gradient Compression, Lin et al. 2018, §3): before a gradient waits, not after."""

import math
from typing import final

import torch
from torch import Tensor


@final
class LocalClipping:
    """Limits each rank's ‖g‖, per tensor and in units of the mean gradient, to limit/√world_size. None: no limit."""

    def __init__(self, limit: float | None) -> None:
        self._limit, self._loss_scale = limit, 1.0

    def factor(self, gradient: Tensor, scale: float) -> float:
        """Return what limits the gradient's norm when it is multiplied by it; `scale` is 1/world_size.

        It is 1 where the norm is not finite: clipping must not hide that.
        """
        if self._limit is None:
            return 1.0
        norm = float(torch.linalg.vector_norm(gradient, dtype=torch.float64))
        limit = self._limit * self._loss_scale * math.sqrt(scale)
        return limit / norm if math.isfinite(norm) and norm > limit else 1.0

    def rescale(self, factor: float) -> None:
        """Follow the loss scale, which has been multiplied by `factor`."""
        self._loss_scale *= factor

"""Local gradient clipping, before a gradient is added to the residual (Lin et al. 2018, §3)."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.waits import on_host


def limited_each(
    gradients: Sequence[Tensor], scale: float, limit: float | None, loss_scale: float
) -> tuple[Sequence[Tensor], Sequence[float]]:
    """Return gradients and factors that make the limited ones times `scale`, 1/world_size; NaN stays.

    Each is clipped to a norm of limit/√world_size times the loss scale. None: no limit.
    """
    if limit is None:
        return gradients, [scale] * len(gradients)
    most = limit * loss_scale * math.sqrt(scale)
    limited, factors = zip(*(_limited(gradient, scale, most) for gradient in gradients), strict=True)
    return limited, factors


def _limited(gradient: Tensor, scale: float, limit: float) -> tuple[Tensor, float]:
    norm = torch.linalg.vector_norm(gradient, dtype=torch.float64)
    if not on_host(norm):
        factor = torch.where(norm.isfinite() & (norm > limit), limit / norm, 1.0)
        return gradient * factor.to(gradient.dtype), scale
    length = float(norm)
    return gradient, scale * (limit / length if math.isfinite(length) and length > limit else 1.0)

"""Residuals of 16 bits: sums rounded by lot, so that small gradients are not lost beside a large residual."""

import torch
from torch import Tensor

from thinwire.kernels.reference.hashing import mix
from thinwire.kernels.reference.select import Picks, select


def accumulate_rounded(out: Tensor, residual: Tensor, gradient: Tensor, scale: float, seed: int) -> None:
    """Compute out = residual + scale · gradient in float32, rounded to bfloat16 up or down with the mean unchanged.

    `out` and `residual` are bfloat16, `gradient` any float; element i draws mix(i). What is not finite stays so.
    """
    total = residual.float().add_(gradient.float(), alpha=scale)
    draws = mix(torch.arange(total.numel(), dtype=torch.int32, device=total.device), seed) & 0xFFFF
    rounded = ((total.view(torch.int32) + draws.to(torch.int32)) & -0x10000).view(torch.float32)
    out.copy_(torch.where(total.isfinite(), rounded, total))


def accumulate_rounded_select(
    out: Tensor, residual: Tensor, gradient: Tensor, scale: float, seed: int, threshold: Tensor, capacity: int
) -> Picks:
    """`accumulate_rounded`, then `select` on its result."""
    accumulate_rounded(out, residual, gradient, scale, seed)
    return select(out, threshold, capacity)

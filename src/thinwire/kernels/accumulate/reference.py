"""Adding a gradient to the residual: plainly, with decay, with momentum, or rounded to 16 bits."""

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.kernels.hashing.reference import mix


def accumulate(out: Tensor, residual: Tensor, gradient: Tensor, scale: float) -> None:
    """Compute out = residual + scale · gradient. `out` may not overlap the inputs."""
    torch.add(residual, gradient.to(residual.dtype), alpha=scale, out=out)


def accumulate_each(
    outs: Sequence[Tensor], residuals: Sequence[Tensor], gradients: Sequence[Tensor], scales: Sequence[float]
) -> None:
    """`accumulate` for each of n ≥ 1 vectors."""
    for out, residual, gradient, scale in zip(outs, residuals, gradients, scales, strict=True):
        wide = gradient if gradient.dtype == residual.dtype else gradient.to(residual.dtype)
        torch.add(residual, wide, alpha=scale, out=out)


def accumulate_fading(out: Tensor, residual: Tensor, gradient: Tensor, scale: float, decay: float) -> None:
    """Compute out = decay · residual + scale · gradient. `out` may not overlap the inputs."""
    torch.mul(residual, decay, out=out).add_(gradient.to(residual.dtype), alpha=scale)


def accumulate_momentum(
    out: Tensor,
    velocity_out: Tensor,
    residual: Tensor,
    velocity: Tensor,
    gradient: Tensor,
    scale: float,
    momentum: float,
    nesterov: bool,
) -> None:
    """Compute u' = m · u + scale · g and out = residual + u', or residual + scale · g + m · u' (Nesterov)."""
    gradient = gradient.to(residual.dtype)
    torch.mul(velocity, momentum, out=velocity_out)
    velocity_out.add_(gradient, alpha=scale)
    if nesterov:
        torch.add(residual, gradient, alpha=scale, out=out).add_(velocity_out, alpha=momentum)
    else:
        torch.add(residual, velocity_out, out=out)


def accumulate_rounded(
    out: Tensor, residual: Tensor, gradient: Tensor, scale: float, seed: int, decay: float = 1.0
) -> None:
    """Compute out = decay · residual + scale · gradient in float32, then round it stochastically to bfloat16.

    `out` and `residual` are bfloat16, `gradient` is any float. Rounding to nearest would lose a small gradient beside a
    large residual for good; this keeps the mean. Element i draws mix(i). Values that are not finite stay so.
    """
    total = residual.float().mul_(decay).add_(gradient.float(), alpha=scale)
    out.copy_(_rounded(total, torch.arange(total.numel(), dtype=torch.int32, device=total.device), seed))


def subtract_rounded(x: Tensor, indices: Tensor, values: Tensor, seed: int) -> None:
    """Subtract values from bfloat16 `x` at indices (int32), and round there as `accumulate_rounded` does.

    Elements with value 0 change nothing. Of the others, none may share an index.
    """
    there = values != 0
    at = indices[there]
    x[at] = _rounded(x[at].float() - values[there].float(), at, seed).to(x.dtype)


def _rounded(x: Tensor, indices: Tensor, seed: int) -> Tensor:
    """Return float32 numbers that bfloat16 holds: above or below x at random, by its index."""
    draws = (mix(indices, seed) & 0xFFFF).to(torch.int32)
    rounded = ((x.view(torch.int32) + draws) & -0x10000).view(torch.float32)
    return torch.where(x.isfinite(), rounded, x)

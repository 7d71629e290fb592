"""What waits plus what is new."""

import torch
from torch import Tensor


def accumulate(out: Tensor, residual: Tensor, gradient: Tensor, scale: float) -> None:
    """Compute out = residual + scale · gradient. `out` may not overlap the inputs."""
    torch.add(residual, gradient.to(residual.dtype), alpha=scale, out=out)


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

"""A worker's step as you would write it in torch."""

from torch import Tensor

MOMENTUM = 0.5  # any value would do; sums of halves are exact
_SAMPLE = 80  # picks in the sample, as in ours


def compensated(residual: Tensor, gradient: Tensor, velocity: Tensor | None) -> Tensor:
    """Error feedback, with momentum correction if there is a velocity. Return the residual."""
    if velocity is None:
        return residual.add_(gradient)
    return residual.add_(velocity.mul_(MOMENTUM).add_(gradient))


def exact(residual: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Exact Top-k as you would write it in torch."""
    return _taken(residual, residual.abs().topk(k, sorted=False).indices)


def masked(residual: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """A sampled threshold as you would write it in torch."""
    sample = residual[:: max(1, k // _SAMPLE) | 1].abs()
    rank = max(1, round(k / residual.numel() * sample.numel()))
    return _taken(residual, (residual.abs() >= sample.topk(rank).values[-1]).nonzero().view(-1))


def _taken(residual: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    values = residual[indices]
    residual[indices] = 0
    return indices, values

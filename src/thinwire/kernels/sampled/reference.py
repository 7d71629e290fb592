"""Adding gradients to the residual, and picking with a threshold from a sample: several vectors in one call."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from thinwire.kernels.accumulate.reference import accumulate_momentum
from thinwire.kernels.select.reference import Picks, accumulate_momentum_select, accumulate_select


class Draw(NamedTuple):
    """How to pick from a vector: by the `rank`-th largest magnitude of a sample, and at most `capacity` elements.

    The sample is every `stride`-th element from `offset` on. With rank 0, every element but 0 reaches the threshold.
    """

    offset: int
    stride: int
    rank: int
    capacity: int

    def threshold(self, sample: Callable[[int, int], Tensor], device: torch.device) -> Tensor:
        """Return the threshold (0-dim). `sample` takes offset and stride."""
        if not self.rank:
            return torch.zeros((), device=device)
        return sample(self.offset, self.stride).abs().topk(self.rank, sorted=False).values.min()

    def room(self, numel: int) -> int:
        """Return how many picks to look at: some three times what the sample promises, and no fewer than are wanted."""
        return min(numel, max(self.capacity, 3 * self.rank * self.stride + 80 if self.rank else numel))


def accumulate_sampled_select(
    outs: Sequence[Tensor],
    residuals: Sequence[Tensor],
    gradients: Sequence[Tensor],
    scales: Sequence[float],
    draws: Sequence[Draw],
) -> tuple[Tensor, Tensor]:
    """`accumulate_select` on each of n ≥ 1 vectors, with thresholds from samples of the sums.

    Returns indices (int32), which count from the vector's first element, and values: `capacity` of the first vector,
    then of the next, and so on. Where fewer elements are picked, −1 and the value 0 follow.
    """
    found = []
    for out, residual, gradient, scale, draw in zip(outs, residuals, gradients, scales, draws, strict=True):
        threshold = draw.threshold(_sum(residual, gradient, scale), out.device)
        found.append(padded(accumulate_select(out, residual, gradient, scale, threshold, draw.capacity), draw))
    return joined(found)


def accumulate_momentum_sampled_select(
    outs: Sequence[Tensor],
    velocity_outs: Sequence[Tensor],
    residuals: Sequence[Tensor],
    velocities: Sequence[Tensor],
    gradients: Sequence[Tensor],
    scales: Sequence[float],
    momentum: float,
    nesterov: bool,
    draws: Sequence[Draw],
) -> tuple[Tensor, Tensor]:
    """`accumulate_momentum_select` on each vector: see `accumulate_sampled_select`."""
    found = []
    vectors = zip(outs, velocity_outs, residuals, velocities, gradients, scales, draws, strict=True)
    for out, moving, residual, velocity, gradient, scale, draw in vectors:
        inputs = (residual, velocity, gradient, scale, momentum, nesterov)
        threshold = draw.threshold(_momentum_sum(*inputs), out.device)
        picks = accumulate_momentum_select(out, moving, *inputs, threshold, draw.capacity)
        found.append(padded(picks, draw))
    return joined(found)


def padded(picks: Picks, draw: Draw) -> tuple[Tensor, Tensor]:
    """Return indices and values, filled up to the capacity with −1 and 0."""
    missing = draw.capacity - picks.indices.numel()
    return pad(picks.indices, (0, missing), value=-1), pad(picks.values, (0, missing))


def joined(found: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return indices and values of all vectors, one after another."""
    indices, values = zip(*found, strict=True)
    return torch.cat(indices), torch.cat(values)


def _sum(residual: Tensor, gradient: Tensor, scale: float) -> Callable[[int, int], Tensor]:
    return lambda offset, stride: residual[offset::stride].add(gradient[offset::stride], alpha=scale)


def _momentum_sum(
    residual: Tensor, velocity: Tensor, gradient: Tensor, scale: float, momentum: float, nesterov: bool
) -> Callable[[int, int], Tensor]:
    def sample(offset: int, stride: int) -> Tensor:
        v, u, g = (x[offset::stride] for x in (residual, velocity, gradient))
        return momentum_sum(v, u, g, scale, momentum, nesterov)

    return sample


def momentum_sum(
    residual: Tensor, velocity: Tensor, gradient: Tensor, scale: float, momentum: float, nesterov: bool
) -> Tensor:
    """Return the sum that `accumulate_momentum` computes."""
    out, moving = torch.empty_like(residual), torch.empty_like(velocity)
    accumulate_momentum(out, moving, residual, velocity, gradient, scale, momentum, nesterov)
    return out

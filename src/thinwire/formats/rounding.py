"""Roundings to the offset float's grid.

Each takes magnitudes as float32 bit patterns (int32), the grid and a seed, and returns patterns without their last
`shift` bits (int32); what it returns below the grid's base stands for zero.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from thinwire.formats.base import generator
from thinwire.formats.grid import Grid, pattern

Rounding = Callable[[Tensor, Grid, int], Tensor]


def truncate(magnitudes: Tensor, grid: Grid, seed: int) -> Tensor:
    """Round towards zero."""
    return magnitudes >> grid.shift


def nearest(magnitudes: Tensor, grid: Grid, seed: int) -> Tensor:
    """Round to the nearest number, ties away from zero; below the smallest, that or zero."""
    rounded = (magnitudes + ((1 << grid.shift) >> 1)).bitwise_right_shift_(grid.shift)
    upwards = magnitudes >= pattern(grid.smallest / 2)
    return torch.maximum(rounded, upwards * grid.base)


def stochastic(magnitudes: Tensor, grid: Grid, seed: int) -> Tensor:
    """Round up or down by lot, so that the expectation is the number; below the smallest, to that or zero."""
    noise = torch.empty_like(magnitudes).random_(generator=generator(magnitudes, seed))
    rounded = (noise & ((1 << grid.shift) - 1)).add_(magnitudes).bitwise_right_shift_(grid.shift)
    upwards = noise.to(torch.float32).mul_(2.0**-31).mul_(grid.smallest) < magnitudes.view(torch.float32)
    return torch.where(magnitudes < grid.base << grid.shift, upwards * grid.base, rounded)


ROUNDINGS: dict[str, Rounding] = {"truncate": truncate, "nearest": nearest, "stochastic": stochastic}

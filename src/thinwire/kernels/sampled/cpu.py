"""Several vectors in one call of a loop: each is sampled, summed and searched while it is in the cache."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinwire.kernels.parts import addresses, in_dtype, sizes
from thinwire.kernels.ranges import map_groups
from thinwire.kernels.sampled import loops
from thinwire.kernels.sampled.reference import Draw
from thinwire.kernels.select.cpu import REALS, as_integers


def accumulate_sampled_select(
    outs: Sequence[Tensor],
    residuals: Sequence[Tensor],
    gradients: Sequence[Tensor],
    scales: Sequence[float],
    draws: Sequence[Draw],
) -> tuple[Tensor, Tensor]:
    """See `reference.accumulate_sampled_select`."""
    dtype = outs[0].dtype
    wide, factors = in_dtype(gradients, dtype), np.array(scales, REALS[dtype])
    return _over_groups(loops.sums, (outs, residuals, wide), draws, factors)


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
    """See `reference.accumulate_momentum_sampled_select`."""
    dtype = outs[0].dtype
    wide, real = in_dtype(gradients, dtype), REALS[dtype]
    columns = (outs, velocity_outs, residuals, velocities, wide)
    return _over_groups(loops.momentum_sums, columns, draws, np.array(scales, real), real(momentum), nesterov)


def _over_groups(
    loop: Callable[..., None], columns: Sequence[Sequence[Tensor]], draws: Sequence[Draw], *rest: Any
) -> tuple[Tensor, Tensor]:
    """Run a loop on groups of vectors in parallel, each of which writes to a place of its own."""
    lengths, dtype = sizes(columns[0]), columns[0][0].dtype
    table, drawn = addresses(*columns), np.array(draws, np.int64)
    starts = np.concatenate([[0], drawn[:, 3].cumsum()])
    indices, values = np.empty(starts[-1], np.int32), torch.empty(int(starts[-1]), dtype=dtype)
    (bits, sign), like = as_integers(values), values.numpy()[:0]

    def run(first: int, last: int) -> None:
        loop(table, lengths, drawn, starts, indices, bits, like, sign, first, last, *rest)

    map_groups(run, lengths)
    return torch.from_numpy(indices), values

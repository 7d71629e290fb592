"""Several vectors in one call of a loop: each is sampled, summed and searched while it is in the cache."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from thinwire.kernels.parts import addresses, in_dtype, sizes
from thinwire.kernels.ranges import map_groups
from thinwire.kernels.sampled import loops
from thinwire.kernels.sampled.reference import Draw, one_by_one
from thinwire.kernels.select.cpu import accumulate_select, as_integers, largest
from thinwire.kernels.sums import Sum


def accumulate_sampled_select(sums: Sum, draws: Sequence[Draw]) -> tuple[Tensor, Tensor]:
    """See `reference.accumulate_sampled_select`. Groups of vectors are taken in parallel."""
    if sums.seeds is not None:
        return one_by_one(sums, draws, accumulate_select, largest)
    lengths, drawn = sizes(sums.outs), np.array(draws, np.int64)
    columns = [sums.outs, sums.residuals, in_dtype(sums.gradients, sums.dtype)]
    if sums.moving is not None and sums.velocities is not None:
        columns += [sums.moving, sums.velocities]
    table, starts = addresses(*columns), np.concatenate([[0], drawn[:, 3].cumsum()])
    indices, values = np.empty(starts[-1], np.int32), torch.empty(int(starts[-1]), dtype=sums.dtype)
    (bits, sign), like, rest = as_integers(values), values.numpy()[:0], sums.factors

    def run(first: int, last: int) -> None:
        loops.sums(table, lengths, drawn, starts, indices, bits, like, sign, first, last, *rest)

    map_groups(run, lengths)
    return torch.from_numpy(indices), values

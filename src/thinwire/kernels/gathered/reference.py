"""Elements of several vectors at given places, and the largest magnitude of each."""

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.kernels.select.reference import peak


def gather_each(xs: Sequence[Tensor], indices: Tensor, runs: Sequence[int]) -> Tensor:
    """Return the elements of each of n ≥ 1 vectors at its run of indices, one vector's after another's."""
    return torch.cat([x.index_select(0, some) for x, some in zip(xs, indices.split(list(runs)), strict=True)])


def peak_of_each(xs: Sequence[Tensor]) -> Tensor:
    """Return the largest magnitude of each of n ≥ 1 vectors: NaN if any is, 0 if there are no elements."""
    return torch.stack([peak(x) for x in xs])

"""Picking large magnitudes in each row of a matrix."""

import torch
from torch import Tensor

from thinwire.kernels.reference.select import magnitude_bits


def largest_in_rows(x: Tensor, width: int, k: int) -> Tensor:
    """Return the indices (int32, ascending) of the k largest magnitudes of every `width` elements.

    Of equal ones the lowest come first. The number of elements is a multiple of `width`, and k at most that.
    """
    ranks = magnitude_bits(x).view(-1, width)
    columns = ranks.sort(dim=1, descending=True, stable=True).indices[:, :k].sort(dim=1).values
    starts = torch.arange(0, x.numel(), width, device=x.device)
    return (columns + starts[:, None]).view(-1).to(torch.int32)

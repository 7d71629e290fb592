"""Picking large magnitudes, also in the same pass as the sum they are picked from.

Magnitudes are compared so that NaN ranks above infinity, and infinity above every number. So values that are not
finite are always selected, never hidden.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.kernels.accumulate.reference import accumulate
from thinwire.kernels.parts import gather
from thinwire.kernels.sums import Sum

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Picks(NamedTuple):
    """What `select` found. `indices` (int32) ascend, and `values` are the elements there.

    On a GPU, the host does not wait to learn how many there are: indices are padded with −1 to the capacity, and values
    with 0. `peak` (0-dim, of the vector's dtype) is the largest magnitude: NaN if any is, 0 if there are no elements.
    """

    indices: Tensor
    values: Tensor
    peak: Tensor


def select(x: Tensor, threshold: Tensor, capacity: int) -> Picks:
    """Pick where 0 < |x| ≥ threshold (0-dim; NaN counts as infinity). If over `capacity` do, pick the `largest`."""
    ranks = magnitude_bits(x)
    least = torch.where(threshold.isnan(), torch.inf, threshold).to(x)
    chosen = (ranks >= magnitude_bits(least)) & (ranks > 0)
    indices = chosen.nonzero().view(-1).to(torch.int32)
    indices = indices if indices.numel() <= capacity else largest(x, capacity)
    return Picks(indices, gather(x, indices), peak(x))


def accumulate_select(sums: Sum, threshold: Tensor, capacity: int) -> Picks:
    """`accumulate` a sum of one vector, then `select` from it."""
    accumulate(sums)
    return select(sums.outs[0], threshold, capacity)


def largest(x: Tensor, k: int) -> Tensor:
    """Return the indices (int32, ascending) of the k largest magnitudes, or of all. Lower indices win ties."""
    order = magnitude_bits(x).sort(descending=True, stable=True).indices
    return order[:k].sort().values.to(torch.int32)


def largest_of_each(xs: Sequence[Tensor], counts: Sequence[int], firsts: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
    """Return the `largest` of each of n ≥ 1 vectors, and the elements there, one vector's after another's.

    Indices count from the vector's first element on, which is 0, or the vector's number of `firsts`.
    """
    picks = [largest(x, k) for x, k in zip(xs, counts, strict=True)]
    values = torch.cat([x.index_select(0, at) for x, at in zip(xs, picks, strict=True)])
    return torch.cat([at + first for at, first in zip(picks, firsts or [0] * len(picks), strict=True)]), values


def peak(x: Tensor) -> Tensor:
    """Return the largest magnitude, 0-dim."""
    return x.abs().amax() if x.numel() else x.new_zeros(())


def magnitude_bits(x: Tensor) -> Tensor:
    """Return magnitudes as integers of the same order, NaN above infinity."""
    integer = INTEGERS[x.element_size()]
    return x.view(integer) & torch.iinfo(integer).max  # on a GPU, abs() may leave NaN its sign


def gather_each(xs: Sequence[Tensor], indices: Tensor, runs: Sequence[int]) -> Tensor:
    """Return the elements of each of n ≥ 1 vectors at its run of indices, one vector's after another's."""
    return torch.cat([x.index_select(0, some) for x, some in zip(xs, indices.split(list(runs)), strict=True)])


def peak_of_each(xs: Sequence[Tensor]) -> Tensor:
    """Return the largest magnitude of each of n ≥ 1 vectors: NaN if any is, 0 if there are no elements."""
    return torch.stack([peak(x) for x in xs])

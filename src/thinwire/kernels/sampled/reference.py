"""Adding gradients to the residual, and picking with a threshold from a sample: several vectors in one call."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from thinwire.kernels.accumulate.reference import accumulate, joined
from thinwire.kernels.hashing.reference import hashed_slots_of_each
from thinwire.kernels.parts import Fit, Found, Ints, Regions, wide
from thinwire.kernels.select.reference import Picks, accumulate_select, largest, largest_of_each
from thinwire.kernels.sums import Sum


class Draw(NamedTuple):
    """How to pick from a vector: by the `rank`-th largest magnitude of a sample, and at most `capacity` elements.

    The sample is every `stride`-th element from `offset` on. With rank 0, every element but 0 reaches the threshold.
    Indices count from `first` on, which is the vector's first element. Where fewer are picked, `last` stands.
    """

    offset: int
    stride: int
    rank: int
    capacity: int
    first: int = 0
    last: int = -1

    def placed(self, found: tuple[Tensor, Tensor]) -> Found:
        """Return indices that count from 0 on, and −1, as they should be; and the values."""
        return Found(torch.where(found[0] < 0, self.last, found[0] + self.first), found[1])

    def threshold(self, sample: Callable[[int, int], Tensor], device: torch.device) -> Tensor:
        """Return the threshold (0-dim). `sample` takes offset and stride."""
        if not self.rank:
            return torch.zeros((), dtype=torch.float32, device=device)
        return sample(self.offset, self.stride).abs().topk(self.rank, sorted=False).values.min()

    def room(self, numel: int) -> int:
        """Return how many picks to look at: some three times what the sample promises, and no fewer than are wanted."""
        return min(numel, max(self.capacity, 3 * self.rank * self.stride + 80 if self.rank else numel))


def accumulate_sampled_select(sums: Sum, draws: Sequence[Draw], fit: Fit | None = None) -> Found:
    """`accumulate_select` on each of the vectors, with thresholds from samples of the sums.

    Returns `capacity` picks of the first vector, then of the next, and so on. Where fewer elements are picked, `last`
    and the value 0 follow. Values are written as `fit` says, or as wide as the sums.
    """
    return one_by_one(sums, draws, accumulate_select, largest, fit)


def accumulate_largest_of_each(
    sums: Sum, counts: Sequence[int], firsts: Sequence[int] = (), fit: Fit | None = None
) -> Found:
    """`accumulate`, then `largest_of_each` of the sums. Values are written as `fit` says, or as wide as the sums."""
    accumulate(sums)
    return written(*largest_of_each(sums.outs, counts, firsts), fit)


def accumulate_hashed_slots(
    sums: Sum, draws: Sequence[Draw], slots: Ints, seeds: Ints, regions: Regions, fit: Fit | None = None
) -> Found:
    """`accumulate_sampled_select`, then `hashed_slots_of_each` of the picks. A draw's `first` is 0."""
    indices, values, _ = accumulate_sampled_select(sums, draws)
    runs = [draw.capacity for draw in draws]
    return written(*hashed_slots_of_each(sums.outs, indices, values, runs, slots, seeds, regions)[:2], fit)


def one_by_one(
    sums: Sum,
    draws: Sequence[Draw],
    select: Callable[[Sum, Tensor, int], Picks],
    best: Callable[[Tensor, int], Tensor],
    fit: Fit | None,
) -> Found:
    """Do it with one kernel that sums and selects, and one that finds the largest."""
    found = []
    for i, draw in enumerate(draws):
        one = sums.one(i)
        picks = select(one, draw.threshold(one.sample, one.outs[0].device), draw.room(one.outs[0].numel()))
        found.append(draw.placed(limited(picks, draw.capacity, best)))
    return written(torch.cat([each.indices for each in found]), torch.cat([each.values for each in found]), fit)


def written(indices: Tensor, values: Tensor, fit: Fit | None) -> Found:
    """Return picks with their values written as `fit` says, and counted."""
    if fit is not None:
        values = joined([values], fit.dtype, 1.0, fit.bound)
    return Found(indices, values, values.count_nonzero())


def limited(picks: Picks, count: int, best: Callable[[Tensor, int], Tensor]) -> tuple[Tensor, Tensor]:
    """Return indices and values of `count` elements: the largest of the picks, then −1 with value 0."""
    indices, values, _ = picks
    if indices.numel() > count:
        chosen = best(wide(values), count)
        indices, values = indices.index_select(0, chosen), values.index_select(0, chosen)
    missing = count - indices.numel()
    if not missing:
        return indices, values
    return pad(indices, (0, missing), value=-1), pad(values, (0, missing))

"""Estimate a threshold from a sample, and pick all elements that reach it in one pass (Lin et al. 2018).

Indices of picks (int32) ascend. A GPU fills them up with −1, so that nothing has to wait until their number is known.
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from thinwire import kernels
from thinwire.kernels import Picks
from thinwire.payloads import Narrow, Sparse, narrowed
from thinwire.signals import Signal

# The sample holds about this many of the picks. So the number of picks varies by about 1/√80 = 11 %.
PICKS_IN_SAMPLE = 80


def candidates(signal: Signal, picks: int, seed: int) -> Picks:
    """Return about `picks` of the largest magnitudes, and at most about four times as many.

    The threshold is the ⌈picks/d · s⌉-th largest of a sample of s magnitudes. The sample is evenly spaced, and `seed`
    sets where it begins. If ties or a misleading sample would yield more, the largest of all are taken exactly.
    """
    if signal.numel == 0:
        return signal.select(torch.full((), torch.inf, device=signal.device), 0)
    if picks >= signal.numel:  # everything; the smallest of a sample would leave something out
        return signal.select(torch.zeros((), device=signal.device), signal.numel)
    stride = max(1, picks // PICKS_IN_SAMPLE) | 1  # odd, so that it walks through all columns of a matrix
    sample = signal.sample(seed % min(stride, signal.numel), stride).abs()
    rank = min(sample.numel(), max(1, math.ceil(picks / signal.numel * sample.numel())))
    return near(signal, sample.topk(rank, sorted=False).values.min(), picks)


def near(signal: Signal, threshold: Tensor, picks: int) -> Picks:
    """Return the elements that reach the threshold (0-dim), or the largest if far more than `picks` do."""
    return signal.select(threshold, min(signal.numel, 4 * picks + PICKS_IN_SAMPLE))


def strongest(signal: Signal, picks: Picks, count: int, narrow: Narrow, seed: int) -> Sparse:
    """Return a payload of `count` elements: the largest of the picks, and padding if there are fewer."""
    indices, values = limited(picks, count)
    values, coded = narrowed(values, narrow, signal.dtype, seed, signal.share)
    return Sparse(indices=filled(indices, signal.numel), values=values, numel=signal.numel, coded=coded)


def limited(picks: Picks, count: int) -> tuple[Tensor, Tensor]:
    """Return indices and values of `count` elements: the largest of the picks, then −1 with value 0."""
    indices, values, _ = picks
    if indices.numel() > count:
        best = largest(values, count)
        indices, values = indices.index_select(0, best), values.index_select(0, best)
    missing = count - indices.numel()
    return pad(indices, (0, missing), value=-1), pad(values, (0, missing))


def filled(indices: Tensor, numel: int) -> Tensor:
    """Replace −1 by the last index. With the value 0, that is padding."""
    return indices.masked_fill(indices < 0, numel - 1)


def largest(x: Tensor, k: int) -> Tensor:
    """Return the indices (int32, ascending) of the k largest magnitudes. NaN counts as largest."""
    x = x.to(torch.promote_types(x.dtype, torch.float32)).contiguous()
    return kernels.largest(x, min(k, x.numel()))


def kth_largest(x: Tensor, k: int) -> Tensor:
    """Return the k-th largest magnitude (0-dim), for 1 ≤ k ≤ x.numel()."""
    return x.index_select(0, largest(x, k)).abs().min()


def room(bound: float, k: int, numel: int) -> int:
    """Return ⌈bound · k⌉, or `numel` if that is less."""
    return min(numel, math.ceil(bound * k))

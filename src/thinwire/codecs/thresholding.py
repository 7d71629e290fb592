"""A threshold from a sample, and one pass that picks what reaches it (Deep Gradient Compression, Lin et al. 2018)."""

import math

import torch
from torch import Tensor

from thinwire.signals import Signal

# The sample holds about this many of the picks: the count of picks then varies by about 1/√80 = 11 %.
PICKS_IN_SAMPLE = 80


def candidates(signal: Signal, picks: int, seed: int) -> Tensor:
    """Return indices (int32) of about `picks` of the largest magnitudes, at most four times as many, in no set order.

    The threshold is the ⌈picks/d · s⌉-th largest of s magnitudes, taken at even distances from an offset drawn by
    `seed`. Where ties or a sample that misleads would yield more, the picks are the exact largest.
    """
    if signal.numel == 0:
        return torch.empty(0, dtype=torch.int32, device=signal.device)
    stride = max(1, picks // PICKS_IN_SAMPLE) | 1  # odd, so that it walks through all columns of a matrix
    sample = signal.sample(seed % min(stride, signal.numel), stride).abs()
    rank = min(sample.numel(), max(1, math.ceil(picks / signal.numel * sample.numel())))
    threshold = float(sample.topk(rank, sorted=False).values.min())
    chosen = signal.select(threshold, 4 * picks + PICKS_IN_SAMPLE)
    return largest(signal.tensor(), picks) if chosen is None else chosen


def largest(x: Tensor, k: int) -> Tensor:
    """Return the indices (int32) of the k largest magnitudes; NaN counts as largest."""
    return x.abs().topk(min(k, x.numel()), sorted=False).indices.to(torch.int32)

"""A threshold from a sample, and one pass that picks what reaches it (Deep Gradient Compression, Lin et al. 2018)."""

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from thinwire.payloads import Narrow, Sparse, narrowed
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


def check_bound(bound: float) -> None:
    """Raise ValueError unless a bound allows the wanted number, and is finite."""
    if not 1 <= bound < math.inf:
        raise ValueError(f"bound is {bound}; expected 1 or more, and finite")


def room(bound: float, k: int, numel: int) -> int:
    """Return ⌈bound · k⌉, or all elements if those are fewer."""
    return min(numel, math.ceil(bound * k))


def near(signal: Signal, threshold: float, capacity: int) -> Tensor:
    """Return the indices (int32) of magnitudes that reach the threshold; of far more than `capacity`, the largest."""
    found = signal.select(threshold, 4 * capacity + PICKS_IN_SAMPLE)
    return largest(signal.tensor(), capacity) if found is None else found


def trimmed(signal: Signal, indices: Tensor, capacity: int) -> Tensor:
    """Return those of the `capacity` largest magnitudes among `indices`."""
    if indices.numel() <= capacity:
        return indices
    return indices.index_select(0, largest(signal.tensor().index_select(0, indices), capacity))


def reaching(signal: Signal, threshold: float, capacity: int) -> Tensor:
    """Return the indices (int32) of magnitudes that reach the threshold, at most `capacity`: then the largest."""
    return trimmed(signal, near(signal, threshold, capacity), capacity)


def kth_largest(x: Tensor, k: int) -> float:
    """Return the k-th largest magnitude, for 1 ≤ k ≤ x.numel()."""
    return float(x.abs().topk(k, sorted=False).values.min())


def padded(indices: Tensor, values: Tensor, count: int, signal: Signal, narrow: Narrow, seed: int) -> Sparse:
    """Return a payload of `count` elements: those given, and padding of index 0 and value 0."""
    missing = (0, count - indices.numel())
    values, coded = narrowed(pad(values, missing), narrow, signal.dtype, seed)
    return Sparse(indices=pad(indices, missing), values=values, numel=signal.numel, coded=coded)

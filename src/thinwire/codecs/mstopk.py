"""Approximate Top-k, by bisection of a threshold."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar, final

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from thinwire import kernels
from thinwire.checked import Count, checked
from thinwire.codecs.base import BucketCodec, kept, side_by_side
from thinwire.kernels.memory import constant, sent_anew
from thinwire.kernels.parts import Cut, Found, wide
from thinwire.payloads import Narrow, Scratch, Sparse
from thinwire.schedules import Density
from thinwire.signals import Signals


@final
@checked
@dataclass(frozen=True, kw_only=True)
class MSTopK(BucketCodec):
    """Send k = round(density · d) elements: all above a threshold, some just below (Shi et al. 2021, Algorithm 1).

    The interval from the mean to the largest magnitude is halved. Each round counts how many of the 2k largest elements
    reach the middle. Elements between the two tightest thresholds fill up the payload: a run of neighbours, chosen by
    the seed. If the density is so high that the k-th largest lies below the mean, many picks are random.

    Args:
        density: The share of elements to send.
        rounds: How often the interval is halved.
        values: How values travel: in the gradient's dtype (None), in another dtype, or in a format of a few bits.
    """

    density: Density
    rounds: Count = 25
    values: Narrow = None

    scratch: ClassVar[Scratch] = Scratch(longest=9, value=10)  # the longest vector in float64, and the payload

    def encode_signals(self, signals: Signals, *, seeds: Sequence[int], cut: Cut, numel: int) -> Sparse:
        """Return k elements. If something is not finite, they are exactly the largest."""
        counts = [kept(self.density, length) for length in signals.lengths]
        xs = signals.tensors()
        vectors = [wide(x) for x in xs]
        twice = [min(2 * k, x.numel()) for k, x in zip(counts, vectors, strict=True)]
        picks, values = kernels.largest_of_each(vectors, twice, cut.offsets)
        rows = pad_sequence(values.abs().to(xs[0].dtype).split(twice), batch_first=True, padding_value=-1.0)
        means = torch.stack([torch.linalg.vector_norm(x, 1, dtype=torch.float64) / max(1, x.numel()) for x in vectors])
        chosen = _pick(rows, means, counts, self.rounds, seeds) if rows.numel() else rows
        candidates = [wide(row[:n]) for row, n in zip(chosen, twice, strict=True)]
        places, _ = kernels.largest_of_each(candidates, counts, [*accumulate(twice[:-1], initial=0)])
        found = Found(picks.index_select(0, places), values.index_select(0, places))
        return side_by_side(signals, found, counts, self.values, seeds=seeds, cut=cut, numel=numel)


def _pick(magnitudes: Tensor, means: Tensor, counts: Sequence[int], rounds: int, seeds: Sequence[int]) -> Tensor:
    """Return in each row 1 for the k magnitudes chosen, else 0 (or −1: padding); the row itself if it is not finite."""
    k = constant(tuple(counts), torch.int64, magnitudes.device)[:, None]
    above, below = _thresholds(magnitudes, means[:, None], k, rounds)
    sure = magnitudes >= above
    maybe = (magnitudes >= below) & ~sure
    missing = k - sure.sum(1, keepdim=True)
    drawn = sent_anew(lambda: torch.frombuffer(array("q", seeds), dtype=torch.int64), magnitudes.device)[:, None]
    start = drawn % (maybe.sum(1, keepdim=True) - missing + 1).clamp_(min=1)
    place = maybe.cumsum(1) - 1
    filling = maybe & (place >= start) & (place < start + missing)
    finite = magnitudes.amax(1, keepdim=True).isfinite()
    return torch.where(finite, (sure | filling).to(magnitudes.dtype), magnitudes)


def _thresholds(magnitudes: Tensor, means: Tensor, k: Tensor, rounds: int) -> tuple[Tensor, Tensor]:
    """Return for each row the lowest threshold tried that at most k reach, or inf, and the highest for more, or 0."""
    low, high = means, magnitudes.amax(1, keepdim=True).double()
    above, below = torch.full_like(low, torch.inf), torch.zeros_like(low)
    for _ in range(rounds):
        middle = (low + high) / 2
        few = (magnitudes >= middle.to(magnitudes.dtype)).sum(1, keepdim=True) <= k
        high, above = torch.where(few, middle, high), torch.where(few, middle, above)
        low, below = torch.where(few, low, middle), torch.where(few, below, middle)
    return above.to(magnitudes.dtype), below.to(magnitudes.dtype)

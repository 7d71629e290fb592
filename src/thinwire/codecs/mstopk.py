"""Approximate Top-k by bisection of the threshold (MSTopK, Shi et al. 2021, Alg. 1)."""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from thinwire.codecs.base import Codec, check_density, kept
from thinwire.codecs.thresholding import largest
from thinwire.payloads import Narrow, Sparse, narrowed
from thinwire.schedules import Schedule
from thinwire.signals import Signal


@final
@dataclass(frozen=True, kw_only=True)
class MSTopK(Codec):
    """Send k = round(density · d): all above a threshold that k or fewer reach, the rest from just below it.

    `rounds` times the interval from mean to largest magnitude is halved; each round counts, among the 2k largest: what
    lies below them more than k reach anyway. What fills up is a stretch, drawn by the seed, of those between the
    tightest thresholds on either side. As the search begins at the mean, a density so high that the k-th largest lies
    below it leaves much to the lot.
    """

    density: float | Schedule
    rounds: int = 25
    values: Narrow = None

    def __post_init__(self) -> None:
        check_density(self.density)

    def encode_signal(self, signal: Signal, *, seed: int = 0) -> Sparse:
        """Return k elements; where something is not finite, the largest exactly."""
        x = signal.tensor()
        k = kept(self.density, signal.numel)
        picks = largest(x, 2 * k)
        magnitudes = x.index_select(0, picks).abs()
        mean = torch.linalg.vector_norm(x, 1, dtype=torch.float64) / max(1, x.numel())
        chosen = _pick(magnitudes, mean, k, self.rounds, seed) if k else magnitudes
        indices = picks.index_select(0, largest(chosen, k))
        values, coded = narrowed(x.index_select(0, indices), self.values, signal.dtype, seed, signal.share)
        return Sparse(indices=indices, values=values, numel=signal.numel, coded=coded)


def _pick(magnitudes: Tensor, mean: Tensor, k: int, rounds: int, seed: int) -> Tensor:
    """Return 1 for the k magnitudes chosen and 0 for the others; the magnitudes if one is not finite."""
    above, below = _thresholds(magnitudes, mean, k, rounds)
    sure = magnitudes >= above
    maybe = (magnitudes >= below) & ~sure
    missing = k - sure.sum()
    start = seed % (maybe.sum() - missing + 1).clamp_(min=1)
    place = maybe.cumsum(0) - 1
    filling = maybe & (place >= start) & (place < start + missing)
    return torch.where(magnitudes.amax().isfinite(), (sure | filling).to(magnitudes.dtype), magnitudes)


def _thresholds(magnitudes: Tensor, mean: Tensor, k: int, rounds: int) -> tuple[Tensor, Tensor]:
    """Return the lowest threshold tried that at most k reach, infinite if none, and the highest that more do, or 0."""
    low, high = mean, magnitudes.amax().double()
    above, below = torch.full_like(low, torch.inf), torch.zeros_like(low)
    for _ in range(rounds):
        middle = (low + high) / 2
        few = (magnitudes >= middle).sum() <= k
        high, above = torch.where(few, middle, high), torch.where(few, middle, above)
        low, below = torch.where(few, low, middle), torch.where(few, below, middle)
    return above, below

"""Approximate Top-k, by bisection of a threshold (MSTopK, Shi et al. 2021, Alg. 1)."""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from thinwire.checked import Count, checked
from thinwire.codecs.base import Codec, kept
from thinwire.payloads import Narrow, Scratch, Sparse, narrowed
from thinwire.schedules import Density
from thinwire.signals import Signal, largest


@final
@checked
@dataclass(frozen=True, kw_only=True)
class MSTopK(Codec):
    """Send k = round(density · d) elements: all above a threshold that k or fewer reach, and some just below it.

    The interval from the mean to the largest magnitude is halved `rounds` times. Each round counts how many of the 2k
    largest reach the middle; a threshold below those is reached by more than k anyway. Elements between the two
    tightest thresholds fill the payload up: a run of neighbours that the seed chooses. The search begins at the mean.
    So if the density is so high that the k-th largest lies below the mean, much is left to chance. Raises ValueError
    for a density outside (0, 1].
    """

    density: Density
    rounds: Count = 25
    values: Narrow = None

    @property
    def scratch(self) -> Scratch:
        """The longest vector in float64, and the payload."""
        return Scratch(longest=8.5, value=10)

    def encode_signal(self, signal: Signal, *, seed: int = 0) -> Sparse:
        """Return k elements. If something is not finite, they are exactly the largest."""
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
    """Return 1 for the k magnitudes chosen and 0 for the others, or the magnitudes if one of them is not finite."""
    above, below = _thresholds(magnitudes, mean, k, rounds)
    sure = magnitudes >= above
    maybe = (magnitudes >= below) & ~sure
    missing = k - sure.sum()
    start = seed % (maybe.sum() - missing + 1).clamp_(min=1)
    place = maybe.cumsum(0) - 1
    filling = maybe & (place >= start) & (place < start + missing)
    return torch.where(magnitudes.amax().isfinite(), (sure | filling).to(magnitudes.dtype), magnitudes)


def _thresholds(magnitudes: Tensor, mean: Tensor, k: int, rounds: int) -> tuple[Tensor, Tensor]:
    """Return the lowest threshold tried that at most k reach, or inf, and the highest that more than k reach, or 0."""
    low, high = mean, magnitudes.amax().double()
    above, below = torch.full_like(low, torch.inf), torch.zeros_like(low)
    for _ in range(rounds):
        middle = (low + high) / 2
        few = (magnitudes >= middle).sum() <= k
        high, above = torch.where(few, middle, high), torch.where(few, middle, above)
        low, below = torch.where(few, low, middle), torch.where(few, below, middle)
    return above, below

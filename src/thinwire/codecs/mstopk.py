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

    `rounds` times the interval from mean to largest magnitude is halved; each round counts. What fills up is a
    stretch, drawn by the seed, of those between the tightest thresholds on either side. As the search begins at the
    mean, a density so high that the k-th largest lies below it leaves much to the lot.
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
        finite = x.numel() > 0 and bool(x.abs().amax().isfinite())
        indices = _pick(x.abs(), k, self.rounds, seed) if finite else largest(x, k)
        values, coded = narrowed(x.index_select(0, indices), self.values, signal.dtype, seed)
        return Sparse(indices=indices.to(torch.int32), values=values, numel=signal.numel, coded=coded)


def _pick(magnitudes: Tensor, k: int, rounds: int, seed: int) -> Tensor:
    above, below = _thresholds(magnitudes, k, rounds)
    sure = (magnitudes >= above).nonzero().view(-1)
    maybe = ((magnitudes < above) & (magnitudes >= below)).nonzero().view(-1)
    missing = k - sure.numel()
    start = seed % (maybe.numel() - missing + 1)
    return torch.cat([sure, maybe[start : start + missing]])


def _thresholds(magnitudes: Tensor, k: int, rounds: int) -> tuple[float, float]:
    """Return the lowest threshold tried that at most k reach, infinite if none, and the highest that more do, or 0."""
    above, below = float("inf"), 0.0
    low, high = float(magnitudes.mean()), float(magnitudes.amax())
    for _ in range(rounds):
        middle = (low + high) / 2
        if int((magnitudes >= middle).sum()) <= k:
            high = above = middle
        else:
            low = below = middle
    return above, below

"""Thresholds: estimated from a sample (Lin et al. 2018), kept, steered, or of a Laplace law (Gupta et al. 2021).

All elements that reach one are picked in one pass. Indices of picks (int32) ascend. A GPU fills them up with −1, so
that the host need not wait for their number.
"""

import math
from abc import abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, ClassVar, final

import torch
from torch import Tensor
from typing_extensions import override

from thinwire.checked import Multiple, Number, Range, checked
from thinwire.codecs.base import Codec, kept
from thinwire.kernels import Draw, Picks
from thinwire.payloads import Narrow, Scratch, Sparse, narrowed
from thinwire.schedules import Density, Every, Schedule
from thinwire.signals import Signal, largest, limited

Gain = Annotated[float, Range("a gain, above 0 and at most 1", above=0, most=1)]
# what finds τ, and candidates, of which the payload is a part: several times as many as are sent
_NOTED = Scratch(element=0.2, value=135, arriving=13)
# The sample holds about this many of the picks. So the number of picks varies by about 1/√80 = 11 %.
PICKS_IN_SAMPLE = 80


def draw(numel: int, picks: int, capacity: int, seed: int, first: int = 0, last: int = -1) -> Draw:
    """Return how to pick about `picks` of the largest of `numel` magnitudes, of which at most `capacity` are wanted.

    The threshold is the ⌈picks/d · s⌉-th largest of a sample of s magnitudes. The sample is evenly spaced, and `seed`
    sets where it begins.
    """
    if picks >= numel:  # everything; the smallest of a sample would leave something out
        return Draw(0, 1, 0, min(numel, capacity), first, last)
    stride = _stride(picks)
    return _drawn(numel, picks, capacity, stride, seed % min(stride, numel), first, last)


@lru_cache(maxsize=4096)
def _drawn(numel: int, picks: int, capacity: int, stride: int, offset: int, first: int, last: int) -> Draw:
    size = -(-(numel - offset) // stride)
    rank = min(size, max(1, math.ceil(picks / numel * size)))
    return Draw(offset, stride, rank, min(numel, capacity), first, last)


def _stride(picks: int) -> int:
    return max(1, picks // PICKS_IN_SAMPLE) | 1  # odd, so that it walks through all columns of a matrix


def sample_bytes(numel: int, picks: int) -> float:
    """Return what the sample of `draw` takes: numbers, their magnitudes, and what finds the threshold, 4 bytes each."""
    return 0 if picks >= numel else 12 * numel / _stride(picks)


class _Threshold(Codec):
    """Send all `|x| ≥ τ`: with room for ⌈bound · k⌉ elements, the largest of them, and padding if there are fewer."""

    density: Density
    bound: Multiple
    values: Narrow

    def encode_signal(self, signal: Signal, *, seed: int = 0) -> Sparse:
        """Return ⌈bound · k⌉ elements, padding included."""
        k = kept(self.density, signal.numel)
        capacity = room(self.bound, k, signal.numel)
        threshold = self._threshold(signal, k)
        picks = near(signal, threshold, capacity)
        self._learn(signal, threshold, picks, k)
        return strongest(signal, picks, capacity, self.values, seed)

    @abstractmethod
    def _threshold(self, signal: Signal, k: int) -> Tensor:
        """Return τ, of which k elements are to reach it (0-dim)."""

    def _learn(self, signal: Signal, threshold: Tensor, picks: Picks, k: int) -> None:
        """Note what the picks say about the next step's τ."""


@final
@checked
@dataclass(frozen=True, kw_only=True)
class KeptThreshold(_Threshold):
    """Send all `|x| ≥ τ`, with τ the k-th largest magnitude of an earlier step (Gupta et al. 2021, Algorithm 1).

    Args:
        density: The share k/d of elements that τ aims at.
        refresh: A function of the step: τ is measured where it is not 0. In between, the memory's note keeps it; with a
            memory that keeps no notes, it is measured at every step.
        bound: The payload has room for ⌈bound · k⌉ elements. If more reach τ, the largest are sent and the others stay
            in the residual. If fewer do, the rest is padding.
        values: How values travel: in the gradient's dtype (None), in another dtype, or in a format of a few bits.
    """

    density: Density
    refresh: Number | Schedule = Every(steps=1000)  # noqa: RUF009 - frozen
    bound: Multiple = 1.5
    values: Narrow = None

    scratch: ClassVar[Scratch] = _NOTED

    @override
    def _threshold(self, signal: Signal, k: int) -> Tensor:
        known = None if signal.note is None or self.refresh else signal.note.read()
        if known is not None:
            return known[0]
        threshold = kth_largest(signal.tensor(), k) if k else torch.zeros((), device=signal.device)
        if signal.note is not None:
            signal.note.write(threshold.view(1))
        return threshold


@final
@checked
@dataclass(frozen=True, kw_only=True)
class SteeredThreshold(_Threshold):
    """Send all `|x| ≥ τ`, and steer τ so that k = round(density · d) elements reach it.

    If n reached it, τ ← τ · (1 + gain · ln(n/k) / ln(d/k)). τ is kept in the memory's note, and starts at the k-th
    largest magnitude.

    Args:
        density: The share k/d of elements that τ aims at.
        bound: The payload has room for ⌈bound · k⌉ elements. If more reach τ, the largest are sent. If fewer do, the
            rest is padding.
        gain: 1 is exact where values follow a Laplace law. With error feedback, residuals pile up just below τ; a
            smaller gain is then steadier.
        values: How values travel: in the gradient's dtype (None), in another dtype, or in a format of a few bits.
    """

    density: Density
    bound: Multiple = 1.5
    gain: Gain = 0.25
    values: Narrow = None

    scratch: ClassVar[Scratch] = _NOTED

    @override
    def _threshold(self, signal: Signal, k: int) -> Tensor:
        note = None if signal.note is None else signal.note.read()
        if note is not None:
            return note[0]
        return kth_largest(signal.tensor(), k) if k else torch.zeros((), device=signal.device)

    @override
    def _learn(self, signal: Signal, threshold: Tensor, picks: Picks, k: int) -> None:
        if signal.note is not None and k:
            signal.note.write((threshold * self._step((picks.indices >= 0).sum(), k, signal.numel)).view(1))

    def _step(self, found: Tensor, k: int, numel: int) -> Tensor:
        if k == numel:
            return torch.ones_like(found)
        step = 1 + self.gain * torch.log(found.clamp(min=0.5) / k) / math.log(numel / k)
        return step.clamp(0.5, 2.0)


@final
@checked
@dataclass(frozen=True, kw_only=True)
class LaplaceThreshold(_Threshold):
    """Send all `|x| ≥ τ` = b · ln(d/k) with b the mean magnitude: no sort, no state (Gupta et al. 2021, Appendix B).

    If values follow a Laplace law, k = round(density · d) elements reach τ. Heavier tails send more at low density and
    fewer at high density.

    Args:
        density: The share k/d of elements that τ aims at.
        bound: The payload has room for ⌈bound · k⌉ elements. If more reach τ, the largest are sent. If fewer do, the
            rest is padding.
        values: How values travel: in the gradient's dtype (None), in another dtype, or in a format of a few bits.
    """

    density: Density
    bound: Multiple = 2.0
    values: Narrow = None

    @override
    def _threshold(self, signal: Signal, k: int) -> Tensor:
        mean = torch.linalg.vector_norm(signal.tensor(), 1) / max(1, signal.numel)
        return mean * math.log(signal.numel / k) if k else mean


def laplace_quantile(mean: Tensor, scale: Tensor, share: float) -> Tensor:
    """Return τ with P(|R| ≥ τ) = `share`, where R follows the Laplace law with mean μ and scale b (both 0-dim).

    Let t = e^(−2|μ|/b) and c = 1 − share. Then τ is |μ| + b · ln((1 + t) / (2 · share)) if that is |μ| or more, and
    |μ| + b · ln(c + √(c² + t)) otherwise.
    """
    center, rest, least = mean.abs(), 1 - share, torch.finfo(scale.dtype).tiny
    tail = torch.exp(-2 * center / scale.clamp(min=least))
    above, below = ((1 + tail) / (2 * share)).log(), (rest + (rest * rest + tail).sqrt()).clamp(min=least).log()
    return (center + scale * torch.where(above >= 0, above, below)).clamp(min=0)


def near(signal: Signal, threshold: Tensor, picks: int) -> Picks:
    """Return the elements that reach the threshold (0-dim), or the largest if far more than `picks` do."""
    return signal.select(threshold, min(signal.numel, 4 * picks + PICKS_IN_SAMPLE))


def strongest(signal: Signal, picks: Picks, count: int, narrow: Narrow, seed: int) -> Sparse:
    """Return a payload of `count` elements: the largest of the picks, and padding if there are fewer."""
    indices, values = limited(picks, count)
    values, coded = narrowed(values, narrow, signal.dtype, seed, signal.share)
    return Sparse(indices=filled(indices, signal.numel), values=values, numel=signal.numel, coded=coded)


def filled(indices: Tensor, numel: int) -> Tensor:
    """Replace −1 by the last index. With the value 0, that is padding."""
    return indices.masked_fill(indices < 0, numel - 1)


def kth_largest(x: Tensor, k: int) -> Tensor:
    """Return the k-th largest magnitude (0-dim), for 1 ≤ k ≤ x.numel()."""
    return x.index_select(0, largest(x, k)).abs().min()


def room(bound: float, k: int, numel: int) -> int:
    """Return ⌈bound · k⌉, or `numel` if that is less."""
    return min(numel, math.ceil(bound * k))

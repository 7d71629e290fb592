"""Random-k: elements drawn at random, the same on every rank."""

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from thinwire.checked import checked
from thinwire.codecs.base import Codec, kept
from thinwire.payloads import Narrow, Scratch, Sparse, narrowed
from thinwire.schedules import Density
from thinwire.signals import Signal


@final
@checked
@dataclass(frozen=True, kw_only=True)
class RandomK(Codec):
    """Send one element, drawn at random, of each of k = round(density · d) equal strata.

    All ranks draw the same elements from the seed. So indices need not travel, and values are summed on the way.
    `unbiased` divides each value by its probability of being drawn, so that the average over seeds is the vector. Leave
    it off with error feedback. With strata the draw costs k instead of d, and the error is that of Random-k. Raises
    ValueError for a density outside (0, 1].
    """

    density: Density
    unbiased: bool = False
    values: Narrow = None
    shared_seed: ClassVar[bool] = True

    @property
    def scratch(self) -> Scratch:
        """Edges of strata, draws, and the payload."""
        return Scratch(value=44)

    def encode_signal(self, signal: Signal, *, seed: int = 0) -> Sparse:
        """Return k elements. If any element of the vector is not finite, every value sent is NaN."""
        peak = signal.select(torch.full((), torch.inf, device=signal.device), 0).peak
        x = signal.tensor()
        indices, widths = _draw(signal.numel, kept(self.density, signal.numel), seed, signal.device)
        values = x.index_select(0, indices)
        if self.unbiased:
            values = values * widths
        values = torch.where(peak.isfinite(), values, torch.nan)
        values, coded = narrowed(values, self.values, signal.dtype, seed, signal.share)
        return Sparse(indices=indices.to(torch.int32), values=values, numel=signal.numel, agreed=True, coded=coded)

    def contraction(self, numel: int) -> float | None:
        """δ = 1/⌈d/k⌉, because the least likely element is drawn once in ⌈d/k⌉ seeds."""
        plain = not self.values and not self.unbiased and numel > 0
        return 1 / -(-numel // kept(self.density, numel)) if plain else None


def _draw(numel: int, k: int, seed: int, device: torch.device) -> tuple[Tensor, Tensor]:
    edges = torch.arange(k + 1, device=device) * numel // max(1, k)
    widths = edges.diff()
    generator = torch.Generator(device=device).manual_seed(seed)
    drawn = torch.rand(k, generator=generator, dtype=torch.float64, device=device) * widths
    return edges[:-1] + drawn.long(), widths

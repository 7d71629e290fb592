"""The largest magnitudes of each row (Gupta et al. 2021, Algorithm 2)."""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.codecs.base import Codec, check_density, kept
from thinwire.codecs.thresholding import largest
from thinwire.payloads import Narrow, Sparse, narrowed
from thinwire.schedules import Schedule
from thinwire.signals import Signal


@final
@dataclass(frozen=True, kw_only=True)
class RowTopK(Codec):
    """Send the k = round(density · width) largest magnitudes of every `width` elements: of each sample of a batch.

    Exactly k, as the paper's mask |x| ≥ τ would let everything pass where a ReLU left a row with fewer than k.
    """

    density: float | Schedule
    width: int
    values: Narrow = None

    def __post_init__(self) -> None:
        check_density(self.density)
        if self.width < 1:
            raise ValueError(f"width is {self.width}; expected 1 element or more")

    def encode_signal(self, signal: Signal, *, seed: int = 0) -> Sparse:
        """Return k elements of each row, and its share of a last row that is shorter."""
        x = signal.tensor()
        indices = largest_in_rows(x, self.width, self.density)
        values, coded = narrowed(x.index_select(0, indices), self.values, signal.dtype, seed, signal.share)
        return Sparse(indices=indices, values=values, numel=signal.numel, coded=coded)

    def contraction(self, numel: int) -> float | None:
        """δ = k / width, or the last row's share if that is less, attained by rows of equal magnitudes."""
        rest = numel % self.width
        widths = [w for w, some in ((self.width, numel >= self.width), (rest, rest > 0)) if some]
        return None if self.values else min((kept(self.density, w) / w for w in widths), default=1.0)


def largest_in_rows(x: Tensor, width: int, density: float | Schedule) -> Tensor:
    """Return the indices (int32, ascending) of the largest of every `width` elements of a flat tensor, and of the rest.

    NaN counts as largest, and of equal ones the lowest index comes first.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    # A NaN that was widened may have other bits than the next one, and would not be its equal.
    x = (wide if wide.dtype == x.dtype else torch.where(wide.isnan(), torch.nan, wide)).contiguous()
    whole = x.numel() // width * width
    picks = kernels.largest_in_rows(x[:whole], width, kept(density, width))
    rest = largest(x[whole:], kept(density, x.numel() - whole))
    return torch.cat((picks, rest + whole)) if rest.numel() else picks

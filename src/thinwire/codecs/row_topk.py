"""Top-k of each row: of each sample of a batch."""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.checked import Width, checked
from thinwire.codecs.base import Codec, kept
from thinwire.payloads import Narrow, Sparse, narrowed
from thinwire.schedules import Density
from thinwire.signals import Signal, largest


@final
@checked
@dataclass(frozen=True, kw_only=True)
class RowTopK(Codec):
    """Send the k = round(density · width) largest magnitudes of each row (Gupta et al. 2021, Algorithm 2).

    It sends exactly k. The paper's mask `|x| ≥ τ` would let everything pass where a ReLU leaves fewer than k elements
    that are not zero.

    Args:
        density: The share of each row to send.
        width: Elements of a row, for example of a sample.
        values: How values travel: in the gradient's dtype (None), in another dtype, or in a format of a few bits.
    """

    density: Density
    width: Width
    values: Narrow = None

    def encode_signal(self, signal: Signal, *, seed: int = 0) -> Sparse:
        """Return k elements of each row. A shorter last row keeps the same share."""
        x = signal.tensor()
        indices = largest_in_rows(x, self.width, self.density)
        values, coded = narrowed(x.index_select(0, indices), self.values, signal.dtype, seed, signal.share)
        return Sparse(indices=indices, values=values, numel=signal.numel, coded=coded)


def largest_in_rows(x: Tensor, width: int, density: Density) -> Tensor:
    """Return where each row's largest magnitudes are (int32, ascending): NaN first, then the lowest of equals."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    # Widened NaNs may have different bits, and would then not count as equal.
    x = (wide if wide.dtype == x.dtype else torch.where(wide.isnan(), torch.nan, wide)).contiguous()
    whole = x.numel() // width * width
    picks = kernels.largest_in_rows(x[:whole], width, kept(density, width))
    rest = largest(x[whole:], kept(density, x.numel() - whole))
    return torch.cat((picks, rest + whole)) if rest.numel() else picks

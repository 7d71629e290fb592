"""Exact Top-k: the largest magnitudes of a vector, or of each row, as of each sample of a batch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.checked import Width, checked
from thinwire.codecs.base import BucketCodec, Codec, fit, kept, side_by_side
from thinwire.kernels.parts import Cut
from thinwire.payloads import Narrow, Scratch, Sparse, narrowed
from thinwire.schedules import Density
from thinwire.signals import Signal, Signals, largest


@final
@checked
@dataclass(frozen=True, kw_only=True)
class TopK(BucketCodec):
    """Send the k = round(density · d) largest magnitudes, exactly (Stich et al. 2018).

    Args:
        density: The share of elements to send.
        values: How values travel: in the gradient's dtype (None), in another dtype, or in a format of a few bits.
    """

    density: Density
    values: Narrow = None

    scratch: ClassVar[Scratch] = Scratch(element=0.3, value=10)  # candidates, and the payload

    def encode_signals(self, signals: Signals, *, seeds: Sequence[int], cut: Cut, numel: int) -> Sparse:
        """Return k elements. NaN counts as largest, and of equal magnitudes the lowest index comes first."""
        counts = [kept(self.density, length) for length in signals.lengths]
        found = signals.largest(counts, cut.offsets, fit(signals, self.values))
        return side_by_side(signals, found, counts, self.values, seeds=seeds, cut=cut, numel=numel)


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

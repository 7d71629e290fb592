"""Random-k: elements drawn at random, the same on every rank."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import ClassVar, final

import numpy as np
import torch
from torch import Tensor

from thinwire import kernels
from thinwire.checked import checked
from thinwire.codecs.base import BucketCodec, kept, side_by_side
from thinwire.kernels.memory import constant, sent_anew
from thinwire.kernels.parts import Cut, Found
from thinwire.payloads import Narrow, Scratch, Sparse
from thinwire.schedules import Density
from thinwire.signals import Signals


@final
@checked
@dataclass(frozen=True, kw_only=True)
class RandomK(BucketCodec):
    """Send one element, drawn at random, of each of k = round(density · d) equal strata (Stich et al. 2018).

    All ranks draw the same elements from the seed. So indices are not sent, and values are summed by an all-reduce.
    With strata the draw costs k instead of d, and the error is that of Random-k.

    Args:
        density: The share of elements to send.
        unbiased: Whether to divide each value by its probability of being drawn, so that the average over seeds is the
            vector. Leave it off with error feedback.
        values: How values travel: in the gradient's dtype (None), in another dtype, or in a format of a few bits.
    """

    density: Density
    unbiased: bool = False
    values: Narrow = None
    shared_seed: ClassVar[bool] = True

    scratch: ClassVar[Scratch] = Scratch(value=110)  # strata, draws, and the payload

    def encode_signals(self, signals: Signals, *, seeds: Sequence[int], cut: Cut, numel: int) -> Sparse:
        """Return k elements. If any element of the vector is not finite, every value sent is NaN."""
        lengths = cut.lengths
        counts = tuple(kept(self.density, length) for length in lengths)
        finite = _of_each(signals.peaks().isfinite(), counts)
        indices, widths = _draw(lengths, counts, seeds, signals.device)
        values = kernels.gather_each(signals.tensors(), indices, counts)
        values = torch.where(finite, values * widths if self.unbiased else values, torch.nan)
        found = Found(kernels.placed(indices.to(torch.int32), cut.regions, counts), values)
        payload = side_by_side(signals, found, counts, self.values, seeds=seeds, cut=cut, numel=numel)
        return replace(payload, agreed=True)


def _of_each(numbers: Tensor, runs: tuple[int, ...]) -> Tensor:
    """Return for each of runs[i] elements the i-th number (…, runs). A single run's is left to broadcasting."""
    if len(runs) == 1:
        return numbers
    counts = constant(runs, torch.int64, numbers.device)
    return numbers.repeat_interleave(counts, dim=-1, output_size=sum(runs))


def _draw(
    lengths: tuple[int, ...], counts: tuple[int, ...], seeds: Sequence[int], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return an index (int64) in each of counts[i] strata of the i-th vector, and how wide the strata are.

    It is drawn by a hash: unlike torch's generators, that gives the same on a CPU and on every model of GPU.
    """
    edges = tuple(accumulate(counts, initial=0))
    table = constant((*lengths, *(max(1, k) for k in counts), *edges[:-1]), torch.int64, device)
    length, k, first = _of_each(table.view(3, -1), counts)
    stratum = torch.arange(edges[-1], device=device).sub_(first)
    starts = (stratum * length).floor_divide_(k)
    there = [i for i, k in enumerate(counts) if k]
    places = constant(tuple(edges[i + 1] - 1 for i in there), torch.int64, device)
    last = constant(tuple(lengths[i] for i in there), torch.int64, device)
    widths = starts.roll(-1).index_copy_(0, places, last).sub_(starts)
    seed = _of_each(sent_anew(lambda: torch.frombuffer(np.array(seeds), dtype=torch.int64), device), counts)
    return starts.add_(kernels.mix(stratum, seed).mul_(widths) >> 32), widths

"""Picking large magnitudes."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from thinwire.kernels.cpu.ranges import map_ranges
from thinwire.kernels.cpu.strongest import INTEGERS, Array, as_integers, strongest
from thinwire.kernels.loops import select as loops
from thinwire.kernels.reference import Picks

BITS: dict[torch.dtype, tuple[Any, Any]] = {
    torch.float32: (np.float32, np.int32),
    torch.float64: (np.float64, np.int64),
}
STREAM_BYTES = 1 << 23
"""From this size on results are written past the cache, which would not hold them anyway."""
FEW, _SAMPLE = 1 << 20, 1 << 16


def select(x: Tensor, threshold: Tensor, capacity: int) -> Picks:
    """See `reference.select`."""
    return _over_ranges(loops.select, x, threshold, capacity)


def accumulate_select(
    out: Tensor, residual: Tensor, gradient: Tensor, scale: float, threshold: Tensor, capacity: int
) -> Picks:
    """See `reference.accumulate_select`."""
    real = BITS[out.dtype][0]
    arrays = [t.numpy() for t in (out, residual, gradient.to(out.dtype).contiguous())]
    return _over_ranges(loops.accumulate_select, out, threshold, capacity, _streams(out), *arrays, real(scale))


def accumulate_momentum_select(
    out: Tensor,
    velocity_out: Tensor,
    residual: Tensor,
    velocity: Tensor,
    gradient: Tensor,
    scale: float,
    momentum: float,
    nesterov: bool,
    threshold: Tensor,
    capacity: int,
) -> Picks:
    """See `reference.accumulate_momentum_select`."""
    real = BITS[out.dtype][0]
    gradient = gradient.to(out.dtype).contiguous()
    arrays = [t.numpy() for t in (out, velocity_out, residual, velocity, gradient)]
    rest = (*arrays, real(scale), real(momentum), nesterov)
    return _over_ranges(loops.momentum_select, out, threshold, capacity, _streams(out, velocity_out), *rest)


def largest(x: Tensor, k: int) -> Tensor:
    """See `reference.largest`: exactly those of the few that a threshold from a sample, or a histogram, leaves."""
    if k and x.numel() > FEW:
        threshold, capacity = sampled(lambda stride: x[::stride].abs(), k, x.numel())
        found = _found(loops.select, x, threshold, capacity)
        if not k <= found.number <= capacity:
            found = _found(loops.select, x, _counted(x, k), x.numel())
        if found.number >= k:  # zeros are not found, and may be wanted
            return strongest(found.indices, found.bits, k)
    bits, _ = as_integers(x)
    return strongest([np.arange(bits.size, dtype=np.int32)], [bits], k)


def sampled(take: Callable[[int], Tensor], k: int, numel: int) -> tuple[Tensor, int]:
    """Return a threshold that a few more than k of `numel` magnitudes reach, and how many these can be.

    `take` returns magnitudes at a stride. The margin is four standard deviations of the sample's count.
    """
    sample = take(numel // _SAMPLE | 1)
    expected = k / numel * sample.numel()
    rank = min(sample.numel(), math.ceil(expected + 4 * math.sqrt(expected) + 1))
    capacity = min(numel, math.ceil((rank + 4 * math.sqrt(rank)) / sample.numel() * numel))
    return sample.topk(rank, sorted=False).values.min(), capacity


def _counted(x: Tensor, k: int) -> Tensor:
    """Return the lower end of that of 2¹¹ classes of magnitude, sign and last bits left out, where the k-th lies."""
    bits, sign = as_integers(x)
    shift = bits.dtype.type(8 * x.element_size() - 12)

    def run(lo: int, hi: int) -> Array:
        counts = np.zeros((4, 1 << 11), np.int64)
        loops.histogram(bits, sign, shift, lo, hi, counts)
        return counts.sum(axis=0)

    above = np.sum(map_ranges(run, x.numel()), axis=0)[::-1].cumsum()
    return _number((2**11 - 1 - np.searchsorted(above, k)) << shift, x)


def _streams(*outs: Tensor) -> bool:
    return all(out.nbytes >= STREAM_BYTES and out.data_ptr() % 64 == 0 for out in outs)


def _number(bits: Any, like: Tensor) -> Tensor:
    """Return the number of these bits, 0-dim, as a number of `like`'s type."""
    return torch.tensor(int(bits), dtype=INTEGERS[like.element_size()]).view(like.dtype)


class _Found(NamedTuple):
    """What ranges found, cut off somewhere beyond the capacity: indices, bits there, and the largest magnitude's."""

    indices: Sequence[Array]
    bits: Sequence[Array]
    peaks: Sequence[int]

    @property
    def number(self) -> int:
        """How many there are, or more than the capacity."""
        return sum(map(len, self.indices))


def _over_ranges(kernel: Callable[..., Any], x: Tensor, threshold: Tensor, capacity: int, *rest: Any) -> Picks:
    """Run a selecting kernel on ranges of `x` side by side, and join what they found."""
    found = _found(kernel, x, threshold, capacity, *rest)
    peak = _number(max(found.peaks), x)
    if found.number > capacity:
        indices = largest(x, capacity)
        return Picks(indices, x.index_select(0, indices), peak)
    values = torch.from_numpy(np.concatenate(found.bits)).view(x.dtype)
    return Picks(torch.from_numpy(np.concatenate(found.indices)), values, peak)


def _found(kernel: Callable[..., Any], x: Tensor, threshold: Tensor, capacity: int, *rest: Any) -> _Found:
    bits, sign = as_integers(x)
    level = abs(float(threshold))
    bar = torch.tensor(level if level == level else torch.inf, dtype=x.dtype)
    least = max(as_integers(bar)[0][()], type(sign)(1))

    def run(lo: int, hi: int) -> tuple[Array, Array, int]:
        room = min(capacity, hi - lo) + 1
        indices, found = np.empty(room, np.int32), np.empty(room, bits.dtype)
        peaks = np.zeros(64 // bits.itemsize, bits.dtype)
        count = kernel(bits, sign, least, lo, hi, indices, found, capacity, peaks, *rest)
        return indices[:count], found[:count], peaks.max()

    return _Found(*zip(*map_ranges(run, x.numel(), align=loops.BLOCK), strict=True))

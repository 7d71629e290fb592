"""Picking large magnitudes."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinwire.kernels.cpu.ranges import map_ranges
from thinwire.kernels.loops import select as loops
from thinwire.kernels.reference import Picks

BITS: dict[torch.dtype, tuple[Any, Any]] = {
    torch.float32: (np.float32, np.int32),
    torch.float64: (np.float64, np.int64),
}
_INTEGERS: dict[int, tuple[torch.dtype, Any]] = {
    2: (torch.int16, np.int16),
    4: (torch.int32, np.int32),
    8: (torch.int64, np.int64),
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
    arrays = [t.numpy() for t in (out, residual, gradient)]
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
    arrays = [t.numpy() for t in (out, velocity_out, residual, velocity, gradient)]
    rest = (*arrays, real(scale), real(momentum), nesterov)
    return _over_ranges(loops.momentum_select, out, threshold, capacity, _streams(out, velocity_out), *rest)


def largest(x: Tensor, k: int) -> Tensor:
    """See `reference.largest`: exactly those of the few that a threshold from a sample, or a histogram, leaves."""
    if k and x.numel() > FEW:
        threshold, capacity = sampled(lambda stride: x[::stride].abs(), k, x.numel())
        found = _reaching(x, threshold, capacity)
        if not k <= found.numel() <= capacity:
            found = _reaching(x, _counted(x, k), x.numel())
        if found.numel() >= k:  # zeros are not found, and may be wanted
            return found[exactly(x[found], k)]
    return exactly(x, k)


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

    def run(lo: int, hi: int) -> np.ndarray[Any, Any]:
        counts = np.zeros((4, 1 << 11), np.int64)
        loops.histogram(bits, sign, shift, lo, hi, counts)
        return counts.sum(axis=0)

    above = np.sum(map_ranges(run, x.numel()), axis=0)[::-1].cumsum()
    return _number((2**11 - 1 - np.searchsorted(above, k)) << shift, x)


def _reaching(x: Tensor, threshold: Tensor, capacity: int) -> Tensor:
    """Return what reaches the threshold, or more than `capacity` of it."""
    return _found(loops.select, x, threshold, capacity)[0].indices


def exactly(x: Tensor, k: int) -> Tensor:
    """See `reference.largest`, for a few."""
    bits, sign = as_integers(x)
    places = np.empty(k + 1, np.int32)
    if k:
        loops.take(bits, sign, *loops.kth(bits, sign, k), places)
    return torch.from_numpy(places[:k])


def _streams(*outs: Tensor) -> bool:
    return all(out.nbytes >= STREAM_BYTES and out.data_ptr() % 64 == 0 for out in outs)


def as_integers(x: Tensor) -> tuple[np.ndarray[Any, Any], Any]:
    """Return `x` as integers, and the mask that takes their sign off."""
    integer, kind = _INTEGERS[x.element_size()]
    return x.view(integer).numpy(), kind(np.iinfo(kind).max)


def _number(bits: Any, like: Tensor) -> Tensor:
    """Return the number of these bits, 0-dim, as a number of `like`'s type."""
    return torch.tensor(int(bits), dtype=_INTEGERS[like.element_size()][0]).view(like.dtype)


def _over_ranges(kernel: Callable[..., Any], x: Tensor, threshold: Tensor, capacity: int, *rest: Any) -> Picks:
    """Run a selecting kernel on ranges of `x` side by side, and join what they found."""
    picks, count = _found(kernel, x, threshold, capacity, *rest)
    if count <= capacity:
        return picks
    indices = largest(x, capacity)
    return Picks(indices, x.index_select(0, indices), picks.peak)


def _found(kernel: Callable[..., Any], x: Tensor, threshold: Tensor, capacity: int, *rest: Any) -> tuple[Picks, int]:
    """Return the picks, cut off somewhere beyond `capacity`, and how many there are, or more than `capacity`."""
    bits, sign = as_integers(x)
    bar = threshold.abs().nan_to_num(nan=torch.inf, posinf=torch.inf).to(x.dtype)
    least = max(as_integers(bar)[0][()], type(sign)(1))

    def run(lo: int, hi: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], int]:
        room = min(capacity, hi - lo) + loops.BLOCK + 1
        indices, found = np.empty(room, np.int32), np.empty(room, bits.dtype)
        count, peak = kernel(bits, sign, least, lo, hi, indices, found, capacity, *rest)
        return indices[:count], found[:count], peak

    indices, found, peaks = zip(*map_ranges(run, x.numel(), align=loops.BLOCK), strict=True)
    values = torch.from_numpy(np.concatenate(found)).view(x.dtype)
    joined = torch.from_numpy(np.concatenate(indices))
    return Picks(joined, values, _number(max(peaks), x)), joined.numel()

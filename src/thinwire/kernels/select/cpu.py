"""Picking large magnitudes: one pass over the vector, range by range on several threads, then an exact choice."""

import math
from collections.abc import Callable, Sequence
from itertools import accumulate as running
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinwire.kernels.accumulate.cpu import accumulate, arguments
from thinwire.kernels.memory import empty
from thinwire.kernels.parts import Array, addresses, sizes
from thinwire.kernels.ranges import map_groups, map_pieces, map_ranges
from thinwire.kernels.select import loops
from thinwire.kernels.select.reference import INTEGERS, Picks
from thinwire.kernels.sums import Sum

_SIGNS = {np.dtype(kind): kind(np.iinfo(kind).max) for kind in (np.int16, np.int32, np.int64)}
STREAM_BYTES = 1 << 23
FEW, _SAMPLE, _SMALL_SAMPLE = 1 << 20, 1 << 16, 1 << 12


def select(x: Tensor, threshold: Tensor, capacity: int) -> Picks:
    return _over_ranges(loops.select, x, threshold, capacity)


def accumulate_select(sums: Sum, threshold: Tensor, capacity: int) -> Picks:
    out = sums.outs[0]
    if sums.seeds is not None:
        accumulate(sums)
        return select(out, threshold, capacity)
    stream = all(map(streams, (out, *(sums.moving or ())))) or None
    return _over_ranges(loops.accumulate_select, out, threshold, capacity, stream, *arguments(sums))


def largest(x: Tensor, k: int) -> Tensor:
    """See `reference.largest`. A sample or a histogram first narrows the choice to a few, if few are wanted."""
    if 4 * k > x.numel() > FEW:
        bits, _ = as_integers(x)
        indices, pieces = zip(
            *map_ranges(lambda lo, hi: (np.arange(lo, hi, dtype=np.int32), bits[lo:hi]), x.numel()), strict=True
        )
        return largest_of_pieces(indices, pieces, k)
    if k and x.numel() > FEW:
        threshold, capacity = sampled(lambda stride: x[::stride].abs(), k, x.numel())
        picks, found, _ = _found(loops.select, x, threshold, capacity)
        if not k <= sum(map(len, picks)) <= capacity:
            picks, found, _ = _found(loops.select, x, _counted(x, k), x.numel())
        if sum(map(len, picks)) >= k:  # the loop skips zeros, but they may be needed
            return largest_of_pieces(picks, found, k)
    return _largest_of_small([x], [k])[0]


def largest_of_each(xs: Sequence[Tensor], counts: Sequence[int], firsts: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
    """See `reference.largest_of_each`. A large vector is divided among threads, and small ones are taken together."""
    indices, values = _largest_of_each(xs, counts)
    if firsts:
        indices.numpy()[:] += np.repeat(np.array(firsts, np.int32), np.minimum(counts, sizes(xs)))
    return indices, values


def _largest_of_each(xs: Sequence[Tensor], counts: Sequence[int]) -> tuple[Tensor, Tensor]:
    if (sizes(xs) <= FEW).all():
        return _largest_of_small(xs, counts)
    found = []
    for small, group in groupby(zip(xs, counts, strict=True), lambda pair: pair[0].numel() <= FEW):
        some, wanted = zip(*group, strict=True)
        if small:
            found.append(_largest_of_small(some, wanted))
        else:
            found += [(at := largest(x, k), x.index_select(0, at)) for x, k in zip(some, wanted, strict=True)]
    indices, values = zip(*found, strict=True)
    return (indices[0], values[0]) if len(found) == 1 else (torch.cat(indices), torch.cat(values))


def _largest_of_small(xs: Sequence[Tensor], counts: Sequence[int]) -> tuple[Tensor, Tensor]:
    lengths, table = sizes(xs), addresses(xs)
    starts = np.concatenate([[0], np.minimum(counts, lengths).cumsum()])
    indices, values = np.empty(starts[-1], np.int32), torch.empty(int(starts[-1]), dtype=xs[0].dtype, device="cpu")
    bits, sign = as_integers(values)

    def run(first: int, last: int) -> None:
        loops.largest_of_each(table, lengths, starts, indices, bits, sign, first, last, _SMALL_SAMPLE)

    map_groups(run, lengths)
    return torch.from_numpy(indices), values


def peak_of_each(xs: Sequence[Tensor]) -> Tensor:
    """See `reference.peak_of_each`. As integers, magnitudes of NaN are the largest."""
    peaks = xs[0].new_empty(len(xs))
    loops.peaks_of_each(addresses(xs), sizes(xs), *as_integers(peaks))
    return peaks


def sampled(take: Callable[[int], Tensor], k: int, numel: int) -> tuple[Tensor, int]:
    """Return a threshold that a few more than k of `numel` magnitudes should reach, and the most that may reach it.

    `take` returns magnitudes at a stride. The margin is four standard deviations of the sample's count.
    """
    sample = take(numel // _SAMPLE | 1)
    expected = k / numel * sample.numel()
    rank = min(sample.numel(), math.ceil(expected + 4 * math.sqrt(expected) + 1))
    capacity = min(numel, math.ceil((rank + 4 * math.sqrt(rank)) / sample.numel() * numel))
    return sample.topk(rank, sorted=False).values.min(), capacity


def _counted(x: Tensor, k: int) -> Tensor:
    """Return the lower end of the histogram bin (a magnitude's 11 highest bits) that holds the k-th largest."""
    bits, sign = as_integers(x)
    shift = bits.dtype.type(8 * x.element_size() - 12)

    def run(lo: int, hi: int) -> Array:
        counts = np.zeros((4, 1 << 11), np.int64)
        loops.histogram(bits, sign, shift, lo, hi, counts)
        return counts.sum(axis=0)

    above = np.sum(map_ranges(run, x.numel()), axis=0)[::-1].cumsum()
    return _number((2**11 - 1 - np.searchsorted(above, k)) << shift, x)


def streams(out: Tensor) -> bool:
    """Whether a result is so large that the cache would not hold it: it is written past it."""
    return out.nbytes >= STREAM_BYTES and out.data_ptr() % 64 == 0


def _number(bits: Any, like: Tensor) -> Tensor:
    """Return the number with these bits, 0-dim, of `like`'s dtype."""
    return torch.tensor(int(bits), dtype=INTEGERS[like.element_size()], device="cpu").view(like.dtype)


def _over_ranges(kernel: Callable[..., Any], x: Tensor, threshold: Tensor, capacity: int, *rest: Any) -> Picks:
    """Run a selecting kernel on ranges of `x` in parallel, and join what they found."""
    indices, bits, peaks = _found(kernel, x, threshold, capacity, *rest)
    peak = _number(max(peaks), x)
    if sum(map(len, indices)) > capacity:
        best = largest(x, capacity)
        return Picks(best, x.index_select(0, best), peak)
    values = torch.from_numpy(np.concatenate(bits)).view(x.dtype)
    return Picks(torch.from_numpy(np.concatenate(indices)), values, peak)


def _found(
    kernel: Callable[..., Any], x: Tensor, threshold: Tensor, capacity: int, *rest: Any
) -> tuple[Sequence[Array], Sequence[Array], Sequence[int]]:
    """Return what each range found, up to one more than the capacity: indices, bits, the largest magnitude's bits."""
    bits, sign = as_integers(x)
    level = abs(float(threshold))
    bar = torch.tensor(level if level == level else torch.inf, dtype=x.dtype, device="cpu")
    least = max(as_integers(bar)[0][()], type(sign)(1))

    def run(lo: int, hi: int) -> tuple[Array, Array, int]:
        room = min(capacity, hi - lo) + 1
        indices, found = np.empty(room, np.int32), np.empty(room, bits.dtype)
        peaks = np.zeros(64 // bits.itemsize, bits.dtype)
        count = kernel(bits, sign, least, lo, hi, indices, found, capacity, peaks, *rest)
        return indices[:count], found[:count], peaks.max()

    indices, found, peaks = zip(*map_ranges(run, x.numel(), align=loops.BLOCK), strict=True)
    return indices, found, peaks


def as_integers(x: Tensor) -> tuple[Array, Any]:
    """Return the bits of `x` as integers, and the mask that removes their sign."""
    bits = x.view(INTEGERS[x.element_size()]).numpy()
    return bits, _SIGNS[bits.dtype]


def largest_of_pieces(indices: Sequence[Array], bits: Sequence[Array], k: int) -> Tensor:
    """Return the indices (int32) of the k largest magnitudes of several arrays, or of all, in their order."""
    k = min(k, sum(map(len, bits)))
    sign = _SIGNS[bits[0].dtype]
    out = empty(k, torch.int32, torch.device("cpu"))
    if not k:
        return out
    small = len(bits) == 1 and len(bits[0]) <= FEW
    bar, ties = loops.kth(bits[0], sign, k) if small else _kth(bits, sign, k)
    if len(bits) == 1:
        loops.take(indices[0], bits[0], sign, bar, ties, out.numpy())
        return out
    above, equal = zip(*map_pieces(lambda piece: loops.tally(bits[piece], sign, bar), bits), strict=True)
    allowed = [max(0, min(here, ties - before)) for here, before in zip(equal, running(equal, initial=0), strict=False)]
    ends = list(running((a + b for a, b in zip(above, allowed, strict=True)), initial=0))

    def take(piece: int) -> None:
        place = out.numpy()[ends[piece] : ends[piece + 1]]
        loops.take(indices[piece], bits[piece], sign, bar, allowed[piece], place)

    map_pieces(take, bits)
    return out


def _kth(bits: Sequence[Array], sign: Any, k: int) -> tuple[Any, int]:
    """Return the k-th largest magnitude's bits, and how many of its equals are among the k; by digits of 11 bits."""
    kind, known, mask, width = type(sign), 0, 0, 8 * bits[0].itemsize - 1
    for shift in (max(0, width - done) for done in range(11, width + 11, 11)):
        counts = _counts(bits, sign, kind(shift), kind(known), kind(mask))
        above = np.cumsum(counts[::-1])
        digit = 2047 - int(np.searchsorted(above, k))
        k -= int(above[2047 - digit] - counts[digit])
        known, mask = known | digit << shift, (mask | 2047 << shift) & int(sign)
    return kind(known), k


def _counts(bits: Sequence[Array], sign: Any, shift: Any, known: Any, mask: Any) -> Array:
    def run(piece: int) -> Array:
        counts = np.zeros(1 << 11, np.int64)
        loops.digits(bits[piece], sign, shift, known, mask, counts)
        return counts

    return np.asarray(np.sum(map_pieces(run, bits), axis=0))

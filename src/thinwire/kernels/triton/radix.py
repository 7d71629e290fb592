"""The k largest magnitudes exactly: digit by digit, the first elements' digits decide which of them count.

Histograms of 11-bit digits give the k-th largest magnitude; every program finds it from them anew, which costs it a few
loads, and the host nothing. Integers add up to the same in any order, so atomics are deterministic here.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.kernels.triton.launch import PROGRAMS, TILE, launch, tile_of, tiles_of

_DIGIT = tl.constexpr(11)
_BINS = tl.constexpr(1 << 11)
_LEVELS = {2: 2, 4: 3, 8: 6}


def write_largest(out: Tensor, x: Tensor, found: Tensor | None = None) -> None:
    """Write the `largest` of x that there is room for, or with `found` (1): only if this says that there are more."""
    k, n, tiles, levels = out.numel(), x.numel(), tiles_of(x.numel()), _LEVELS[x.element_size()]
    if not 0 < k <= n:
        return
    histograms = torch.zeros(levels << 11, dtype=torch.int32, device=x.device)
    counts = torch.empty(tiles, dtype=torch.int64, device=x.device)
    programs, args = min(PROGRAMS, tiles), (x, histograms, found, n, k)
    for level in range(levels):
        launch(_count_digits, programs, *args, level, LEVELS=levels, TILE=TILE, num_warps=8)
    launch(_count, programs, *args, counts, LEVELS=levels, TILE=TILE, num_warps=8)
    ends = counts.cumsum(0)
    launch(_place, programs, *args, counts, ends, out, LEVELS=levels, TILE=TILE, num_warps=8)


@triton.jit
def _bar(histograms, k, levels):
    """Return the first digits of the k-th largest, and how many of the k largest have the same."""
    bins = tl.arange(0, _BINS)
    bar, left = k.to(tl.int64) * 0, k
    for level in range(levels):
        histogram = tl.load(histograms + level * _BINS + bins)
        above = tl.sum(histogram, 0) - tl.cumsum(histogram, 0)
        digit = tl.sum((above >= left).to(tl.int32), 0)
        left -= tl.sum(tl.where(bins == digit, above, 0), 0)
        bar = (bar << _DIGIT) + digit
    return bar, left


@triton.jit
def _superfluous(found, k):
    result = False
    if found is not None:
        result = tl.load(found) <= k
    return result


@triton.jit(do_not_specialize=["k", "level"])
def _count_digits(x, histograms, found, n, k, level, LEVELS: tl.constexpr, TILE: tl.constexpr):
    if _superfluous(found, k):
        return
    bar, _left = _bar(histograms, k, level)
    counts = tl.zeros([_BINS], tl.int32)
    for tile in range(tl.program_id(0), tl.cdiv(n, TILE), tl.num_programs(0)):
        bits, _index, valid = tile_of(x, tile, n, TILE)
        digits = bits >> (_DIGIT * (LEVELS - 1 - level))
        valid = valid & ((digits >> _DIGIT) == bar.to(bits.dtype))
        counts += tl.histogram((digits & (_BINS - 1)).to(tl.int32), _BINS, mask=valid)
    tl.atomic_add(histograms + level * _BINS + tl.arange(0, _BINS), counts, mask=counts > 0, sem="relaxed")


@triton.jit
def _above_and_ties(x, tile, n, bar, TILE: tl.constexpr):
    bits, index, valid = tile_of(x, tile, n, TILE)
    bar = bar.to(bits.dtype)
    return (valid & (bits > bar)).to(tl.int32), (valid & (bits == bar)).to(tl.int32), index


@triton.jit(do_not_specialize=["k"])
def _count(x, histograms, found, n, k, counts, LEVELS: tl.constexpr, TILE: tl.constexpr):
    if _superfluous(found, k):
        return
    bar, _left = _bar(histograms, k, LEVELS)
    for tile in range(tl.program_id(0), tl.cdiv(n, TILE), tl.num_programs(0)):
        above, ties, _index = _above_and_ties(x, tile, n, bar, TILE)
        tl.store(counts + tile, (tl.sum(above, 0).to(tl.int64) << 32) + tl.sum(ties, 0))


@triton.jit(do_not_specialize=["k"])
def _place(x, histograms, found, n, k, counts, ends, out, LEVELS: tl.constexpr, TILE: tl.constexpr):
    if _superfluous(found, k):
        return
    bar, allowed = _bar(histograms, k, LEVELS)
    for tile in range(tl.program_id(0), tl.cdiv(n, TILE), tl.num_programs(0)):
        above, ties, index = _above_and_ties(x, tile, n, bar, TILE)
        before = tl.load(ends + tile) - tl.load(counts + tile)
        within = tl.cumsum((above << 16) + ties, 0)
        ties_before = (before & 0xFFFFFFFF).to(tl.int32) + (within & 0xFFFF) - ties
        place = (before >> 32).to(tl.int32) + (within >> 16) - above + tl.minimum(ties_before, allowed)
        taken = (above > 0) | ((ties > 0) & (ties_before < allowed))
        tl.store(out + place, index, mask=taken)

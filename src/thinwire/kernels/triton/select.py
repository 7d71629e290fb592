"""Picking large magnitudes, without the host's knowing how many.

Every tile's program counts its picks and keeps the first few of them; a second kernel lays them side by side where the
counts before them say. Should there be more than `capacity`, it does nothing, and the kernels of `radix` do something.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.kernels.reference import Picks
from thinwire.kernels.reference.select import gather
from thinwire.kernels.triton.accumulate import total
from thinwire.kernels.triton.launch import TILE, factor, launch, magnitudes, tile_of, tiles_of, wide
from thinwire.kernels.triton.radix import write_largest

_ROOM = 64
"""How many picks of a tile are kept: of a tile with more, all are looked for again."""
_GROUP = 32
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def select(x: Tensor, threshold: Tensor, capacity: int) -> Picks:
    """See `reference.select`; the indices are always `capacity`, of which the last may be −1."""
    return select_as("given", x, (None, None, None, None, None, None, 0, 0), threshold, capacity)


def accumulate_select(
    out: Tensor, residual: Tensor, gradient: Tensor, scale: float, threshold: Tensor, capacity: int
) -> Picks:
    """See `reference.accumulate_select`, and `select`."""
    rest = (None, residual, None, gradient, factor(out, scale), None, 0, 0)
    return select_as("sum", out, rest, threshold, capacity)


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
    """See `reference.accumulate_momentum_select`, and `select`."""
    rest = (velocity_out, residual, velocity, gradient, factor(out, scale), factor(out, momentum), 0, 0)
    return select_as("nesterov" if nesterov else "momentum", out, rest, threshold, capacity)


def largest(x: Tensor, k: int) -> Tensor:
    """See `reference.largest`."""
    out = torch.empty(min(k, x.numel()), dtype=torch.int32, device=x.device)
    write_largest(out, x)
    return out


def select_as(how: str, x: Tensor, rest: tuple[Any, ...], threshold: Tensor, capacity: int) -> Picks:
    """Accumulate into x, with the rest of the arguments of `total`, or take it as given, and select from it."""
    n, tiles = x.numel(), tiles_of(x.numel())
    picks = torch.full((capacity,), -1, dtype=torch.int32, device=x.device)
    if not n:
        return Picks(picks, x.new_zeros(capacity), x.new_zeros(()))
    counts, peaks = picks.new_empty(tiles), picks.new_empty(tiles, dtype=_INTEGERS[x.element_size()])
    kept = picks.new_empty(tiles, _ROOM)
    state = (threshold.to(x), n, counts, peaks, kept)
    launch(_find, tiles, x, *rest, *state, HOW=how, TILE=TILE, ROOM=_ROOM, num_warps=8)
    ends = counts.cumsum(0, dtype=torch.int32)
    sizes = {"TILE": TILE, "ROOM": _ROOM, "GROUP": _GROUP, "num_warps": 8}
    launch(_gather, tiles_of(tiles, _GROUP), picks, x, threshold.to(x), n, counts, ends, kept, tiles, capacity, **sizes)
    write_largest(picks, x, ends[-1:])
    return Picks(picks, gather(x, picks), peaks.amax().view(x.dtype))


@triton.jit
def _hits(bits, valid, threshold):
    # The mask counts as well: zero times a scale that is not finite is NaN.
    least = wide(tl.load(threshold))
    least = tl.where(least != least, float("inf"), least)
    return (valid & (bits >= tl.maximum(magnitudes(least.to(threshold.dtype.element_ty)), 1))).to(tl.int32)


@triton.jit(do_not_specialize=["high", "low"])
def _find(
    x,
    velocity_out,
    residual,
    velocity,
    gradient,
    scale,
    momentum,
    high,
    low,
    threshold,
    n,
    counts,
    peaks,
    kept,
    HOW: tl.constexpr,
    TILE: tl.constexpr,
    ROOM: tl.constexpr,
):
    tile = tl.program_id(0)
    start = tile.to(tl.int64) * TILE
    at = tl.arange(0, TILE)
    valid = at < n - start
    bits = magnitudes(
        total(x, velocity_out, residual, velocity, gradient, scale, momentum, high, low, start, at, valid, HOW)
    )
    hit = _hits(bits, valid, threshold)
    rank = tl.cumsum(hit, 0) - 1
    tl.store(kept + tile * ROOM + rank, (start + at).to(tl.int32), mask=(hit > 0) & (rank < ROOM))
    tl.store(counts + tile, tl.sum(hit, 0))
    tl.store(peaks + tile, tl.max(tl.where(valid, bits, 0), 0).to(peaks.dtype.element_ty))


@triton.jit(do_not_specialize=["tiles", "capacity"])
def _gather(
    picks,
    x,
    threshold,
    n,
    counts,
    ends,
    kept,
    tiles,
    capacity,
    TILE: tl.constexpr,
    ROOM: tl.constexpr,
    GROUP: tl.constexpr,
):
    if tl.load(ends + tiles - 1) > capacity:
        return
    first = tl.program_id(0) * GROUP
    rows = first + tl.arange(0, GROUP)
    count = tl.load(counts + rows, mask=rows < tiles, other=0)
    begin = tl.load(ends + rows, mask=rows < tiles, other=0) - count
    rank = tl.arange(0, ROOM)[None, :]
    there = (rank < count[:, None]) & (count <= ROOM)[:, None]
    found = tl.load(kept + rows[:, None] * ROOM + rank, mask=there)
    tl.store(picks + begin[:, None] + rank, found, mask=there)
    if tl.max(count, 0) > ROOM:
        for tile in range(first, tl.minimum(first + GROUP, tiles)):
            count_here = tl.load(counts + tile)
            if count_here > ROOM:
                bits, index, valid = tile_of(x, tile, n, TILE)
                hit = _hits(bits, valid, threshold)
                place = tl.load(ends + tile) - count_here + tl.cumsum(hit, 0) - 1
                tl.store(picks + place, index, mask=hit > 0)

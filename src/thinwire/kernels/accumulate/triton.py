"""Adding gradients to residuals, and joining small ones. `total` is also the first half of kernels that select."""

from collections.abc import Sequence
from itertools import accumulate as running
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.kernels.accumulate import reference
from thinwire.kernels.hashing.triton import hash32, signed_keys
from thinwire.kernels.parts import Vectors, sizes, whole
from thinwire.kernels.ranges import is_single_threaded
from thinwire.kernels.sums import Sum
from thinwire.kernels.triton import (
    PROGRAMS,
    TILE,
    addresses,
    factor,
    factor_at,
    factors,
    fitting,
    launch,
    pointer,
    table,
    tiles_of,
    tiles_of_each,
    wide,
)

_FEW = 1024
"""Elements that a program takes of those that were sent."""


def accumulate(sums: Sum) -> None:
    """See `reference.accumulate`. Several take one launch, but where each draws from its own seed.

    One that is large is read faster by a kernel that knows where it begins; a small one needs fewer launches otherwise.
    """
    plain = sums.how == "sum" and sums.gradients[0].dtype == sums.dtype
    alone = len(sums.scales) == 1 and (plain or not is_single_threaded(sums.outs[0].numel()))
    if not alone and sums.how != "rounded":
        like, lengths = sums.outs[0], [x.numel() for x in sums.outs]
        tiles = tiles_of_each(tuple(lengths), like.device)
        *of_each, size = arguments_of_each(sums, lengths)
        launch(_accumulate, len(tiles), like, *of_each, 0, 0, size, tiles, HOW=sums.how, TILE=TILE, num_warps=8)
        return
    for one in map(sums.one, range(len(sums))):
        out = one.outs[0]
        if plain:  # torch's own operation is as good, and one launch less
            reference.accumulate(one)
        else:
            args = (out, None, out, *arguments(one), out.numel(), None)
            launch(_accumulate, tiles_of(out.numel()), *args, HOW=one.how, TILE=TILE, num_warps=8)


def arguments(sums: Sum) -> tuple[Any, ...]:
    """Return the arguments that `total` takes for one sum, between `out` and the tile."""
    out, decay = sums.outs[0], None if sums.decays is None else sums.decays[0]
    rate = decay if sums.velocities is None else sums.momentum
    moving, velocity = (None if xs is None else xs[0] for xs in (sums.moving, sums.velocities))
    tensors, high_low = (moving, sums.residuals[0], velocity, sums.gradients[0]), (0, 0)
    if sums.seeds is not None:
        high_low = signed_keys(sums.seeds[0])
    return *tensors, factor(out, sums.scales[0]), None if rate is None else factor(out, rate), *high_low


def arguments_of_each(sums: Sum, *columns: Sequence[int]) -> Sequence[Tensor]:
    """Return the arguments that `of_vector` takes, between `like` and the vector; and more columns of the table."""
    outs, like = sums.outs, sums.outs[0]
    places = (outs, sums.moving or outs, sums.residuals, sums.velocities or outs, sums.gradients)
    rates = factors(like, sums.scales), factors(like, sums.decays or [sums.momentum] * len(outs))
    return sums.gradients[0], *table(like.device, *map(addresses, places), *rates, *columns)


def joined(xs: Sequence[Tensor], dtype: torch.dtype, factor: float = 1.0, bound: float | None = None) -> Tensor:
    """See `reference.joined`: in one launch. A single vector that is only converted or multiplied takes no more."""
    if len(whole(xs)) == 1 and bound is None and (factor == 1 or dtype == xs[0].dtype):
        return reference.joined(xs, dtype, factor)
    lengths, like = tuple(sizes(xs).tolist()), xs[0]
    tiles, out = tiles_of_each(lengths, like.device), like.new_empty(sum(lengths), dtype=dtype)
    starts, times = [*running(lengths[:-1], initial=0)], factors(like, [factor] * len(lengths))
    columns = table(like.device, addresses(xs), lengths, starts, times)
    launch(_join, len(tiles), out, like, *columns, bound, tiles, TIMES=factor != 1, TILE=TILE)
    return out


def clamped(means: Vectors, wide: Vectors, scale: float, bound: float) -> tuple[Tensor, Tensor]:
    """See `reference.clamped`. Two launches: one looks, and one writes."""
    lengths, (like, wider) = tuple(sizes(means).tolist()), (means[0], wide[0])
    tiles = tiles_of_each(lengths, like.device)
    if not len(tiles):
        return reference.clamped(means, wide, scale, bound)
    programs, starts = min(PROGRAMS, len(tiles)), [*running(lengths[:-1], initial=0)]
    columns = table(like.device, addresses(means), addresses(wide), lengths, starts)
    found = torch.empty(programs, dtype=torch.int32, device=like.device)
    launch(_look, programs, like, wider, found, *columns[:3], tiles, len(tiles), TILE=TILE)
    finite, added = found.new_empty((), dtype=torch.bool), wider.new_empty(sum(lengths))
    args = (like, wider, found, programs, *columns, finite, added, scale, bound, tiles)
    launch(_clamp, len(tiles), *args, ROOM=PROGRAMS, TILE=TILE)
    return finite, added


def subtract_rounded(x: Tensor, indices: Tensor, values: Tensor, seed: int) -> None:
    args = (x, indices, values, indices.numel(), *signed_keys(seed))
    launch(_subtract_rounded, tiles_of(indices.numel(), _FEW), *args, FEW=_FEW)


@triton.jit(do_not_specialize=["high", "low"])
def _subtract_rounded(x, indices, values, n, high, low, FEW: tl.constexpr):
    at = tl.program_id(0) * FEW + tl.arange(0, FEW)
    value = tl.load(values + at, mask=at < n, other=0.0)
    there = (at < n) & (value != 0)
    index = tl.load(indices + at, mask=there, other=0).to(tl.int64)
    after = tl.load(x + index, mask=there, other=0.0).to(tl.float32) - value.to(tl.float32)
    tl.store(x + index, _rounded(after, index, high, low).to(x.dtype.element_ty), mask=there)


@triton.jit
def _join(out, like, at, size, begin, factor, bound, tiles, TIMES: tl.constexpr, TILE: tl.constexpr):
    vector, start = tl.load(tiles + 3 * tl.program_id(0)), tl.load(tiles + 3 * tl.program_id(0) + 1)
    place = start.to(tl.int64) + tl.arange(0, TILE)
    there = place < tl.load(size + vector)
    x = tl.load(pointer(at, vector, like) + place, mask=there)
    if TIMES:
        x = (wide(x) * tl.load(factor_at(factor, vector, like))).to(x.dtype)
    tl.store(out + tl.load(begin + vector) + place, fitting(x, bound, out), mask=there)


@triton.jit(do_not_specialize=["count"])
def _look(like, wide_like, found, mean, wide_, size, tiles, count, TILE: tl.constexpr):
    """Find whether there is a mean, or a wide one, that is not finite."""
    means, wides = tl.zeros([TILE], tl.int32), tl.zeros([TILE], tl.int32)
    for tile in range(tl.program_id(0), count, tl.num_programs(0)):
        vector, at = tl.load(tiles + 3 * tile), tl.load(tiles + 3 * tile + 1).to(tl.int64) + tl.arange(0, TILE)
        there = at < tl.load(size + vector)
        narrow = wide(tl.load(pointer(mean, vector, like) + at, mask=there, other=0.0))
        x = tl.load(pointer(wide_, vector, wide_like) + at, mask=there, other=0.0)
        means |= tl.where(tl.abs(narrow) < float("inf"), 0, 1)
        wides |= tl.where(tl.abs(x) < float("inf"), 0, 2)
    tl.store(found + tl.program_id(0), tl.max(means, 0) + tl.max(wides, 0))


@triton.jit(do_not_specialize=["programs"])
def _clamp(
    like, wide_like, found, programs, mean, wide_, size, begin, finite, added, scale, bound, tiles,
    ROOM: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    each = tl.arange(0, ROOM)
    seen = tl.load(found + each, mask=each < programs, other=0)
    beyond, infinite = tl.max(seen & 1, 0) > 0, tl.max(seen & 2, 0) > 0
    tl.store(finite, infinite == 0, mask=tl.program_id(0) == 0)
    vector, start = tl.load(tiles + 3 * tl.program_id(0)), tl.load(tiles + 3 * tl.program_id(0) + 1)
    at = start.to(tl.int64) + tl.arange(0, TILE)
    n = tl.load(size + vector)
    needed = at < tl.where(beyond & (infinite == 0), n, 0)
    x = tl.load(pointer(wide_, vector, wide_like) + at, mask=needed, other=0.0)
    fits = fitting(x, bound, like)
    tl.store(pointer(mean, vector, like) + at, fits, mask=needed)
    tl.store(added + tl.load(begin + vector) + at, (wide(fits) - x) * scale, mask=at < n)


@triton.jit(do_not_specialize=["high", "low"])
def _accumulate(
    like, gradient_like, out, velocity_out, residual, velocity, gradient, scale, momentum, high, low, size, tiles,
    HOW: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Of one vector; or of several, with `tiles`: then the arguments are columns of a table."""
    sums = out, velocity_out, residual, velocity, gradient, scale, momentum, high, low
    start = tl.program_id(0).to(tl.int64) * TILE
    if tiles is not None:
        vector = tl.load(tiles + 3 * tl.program_id(0))
        start, size = tl.load(tiles + 3 * tl.program_id(0) + 1).to(tl.int64), tl.load(size + vector)
        sums = of_vector(like, gradient_like, sums, vector)
    at = tl.arange(0, TILE)
    total(sums, start, at, at < size - start, HOW)


@triton.jit
def of_vector(like, gradient_like, sums, vector):
    """Return the arguments of one vector's sum, from the columns of a table."""
    out, velocity_out = pointer(sums[0], vector, like), pointer(sums[1], vector, like)
    residual, velocity = pointer(sums[2], vector, like), pointer(sums[3], vector, like)
    scale, momentum = factor_at(sums[5], vector, like), factor_at(sums[6], vector, like)
    return out, velocity_out, residual, velocity, pointer(sums[4], vector, gradient_like), scale, momentum, 0, 0


@triton.jit
def total(sums, start, at, valid, HOW: tl.constexpr):
    """Accumulate a tile into the first of `sums`, and return it as written; or what that holds if HOW is "given".

    These are out, velocity_out, residual, velocity, gradient, scale, momentum, and two keys. The momentum is the factor
    on the velocity, or for "fading" and "rounded" on the residual; None stands for 1.
    """
    if HOW == "given":
        written = tl.load(sums[0] + start + at, mask=valid)
    else:
        written, kept = summed(sums, start + at, valid, HOW)
        if (HOW == "momentum") | (HOW == "nesterov"):
            tl.store(sums[1] + start + at, kept, mask=valid)
        tl.store(sums[0] + start + at, written, mask=valid)
    return written


@triton.jit
def summed(sums, at, valid, HOW: tl.constexpr):
    """Return sums, and the velocities with momentum, without writing them."""
    _out, _velocity_out, residual, velocity, gradient, scale, momentum, high, low = sums
    before = tl.load(residual + at, mask=valid)
    kept, new = before, tl.load(gradient + at, mask=valid)
    if HOW == "rounded":
        wider = before.to(tl.float32)
        if momentum is not None:
            wider *= tl.load(momentum)
        after = _rounded(wider + tl.load(scale) * new.to(tl.float32), at, high, low)
    else:
        new = tl.load(scale) * wide(new.to(before.dtype))
        if HOW == "sum":
            after = wide(before) + new
        elif HOW == "fading":
            after = tl.load(momentum) * wide(before) + new
        else:
            moving = tl.load(momentum) * wide(tl.load(velocity + at, mask=valid)) + new
            kept = moving.to(before.dtype)
            if HOW == "nesterov":
                after = wide(before) + new + tl.load(momentum) * wide(kept)
            else:
                after = wide(before) + wide(kept)
    return after.to(before.dtype), kept


@triton.jit
def _rounded(x, index, high, low):
    """Round float32 to bfloat16 stochastically: add a random number to the bits that are then cut off."""
    bits = x.to(tl.int32, bitcast=True)
    drawn = (hash32(index, high, low) & 0xFFFF).to(tl.int32)
    rounded = ((bits + drawn) & -0x10000).to(tl.float32, bitcast=True)
    return tl.where((bits & 0x7FFFFFFF) < 0x7F800000, rounded, x)

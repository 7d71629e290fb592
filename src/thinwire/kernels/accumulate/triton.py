"""Adding a gradient to what waits. `total` is also the first half of the kernels that select in the same pass."""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from thinwire.kernels.hashing.triton import hash32, signed_keys
from thinwire.kernels.triton import TILE, factor, launch, tiles_of, wide


def accumulate_fading(out: Tensor, residual: Tensor, gradient: Tensor, scale: float, decay: float) -> None:
    """See `reference.accumulate_fading`."""
    rest = fading_arguments(out, residual, gradient, scale, decay)
    launch(_accumulate, tiles_of(out.numel()), out, *rest, out.numel(), HOW="fading", TILE=TILE, num_warps=8)


def fading_arguments(out: Tensor, residual: Tensor, gradient: Tensor, scale: float, decay: float) -> tuple[Any, ...]:
    """Return the arguments that `total` takes between `out` and the tile."""
    return None, residual, None, gradient, factor(out, scale), factor(out, decay), 0, 0


def accumulate_momentum(
    out: Tensor,
    velocity_out: Tensor,
    residual: Tensor,
    velocity: Tensor,
    gradient: Tensor,
    scale: float,
    momentum: float,
    nesterov: bool,
) -> None:
    """See `reference.accumulate_momentum`."""
    tensors = (out, velocity_out, residual, velocity, gradient)
    factors = factor(out, scale), factor(out, momentum), 0, 0
    how = "nesterov" if nesterov else "momentum"
    launch(_accumulate, tiles_of(out.numel()), *tensors, *factors, out.numel(), HOW=how, TILE=TILE, num_warps=8)


def accumulate_rounded(
    out: Tensor, residual: Tensor, gradient: Tensor, scale: float, seed: int, decay: float = 1.0
) -> None:
    """See `reference.accumulate_rounded`."""
    rest = rounded_arguments(out, residual, gradient, scale, seed, decay)
    launch(_accumulate, tiles_of(out.numel()), out, *rest, out.numel(), HOW="rounded", TILE=TILE, num_warps=8)


def rounded_arguments(
    out: Tensor, residual: Tensor, gradient: Tensor, scale: float, seed: int, decay: float
) -> tuple[Any, ...]:
    """Return the arguments that `total` takes between `out` and the tile."""
    fading = None if decay == 1 else factor(out, decay)
    return None, residual, None, gradient, factor(out, scale), fading, *signed_keys(seed)


@triton.jit(do_not_specialize=["high", "low"])
def _accumulate(
    out,
    velocity_out,
    residual,
    velocity,
    gradient,
    scale,
    momentum,
    high,
    low,
    n,
    HOW: tl.constexpr,
    TILE: tl.constexpr,
):
    start = tl.program_id(0).to(tl.int64) * TILE
    at = tl.arange(0, TILE)
    there = at < n - start
    total(out, velocity_out, residual, velocity, gradient, scale, momentum, high, low, start, at, there, HOW)


@triton.jit
def total(
    out,
    velocity_out,
    residual,
    velocity,
    gradient,
    scale,
    momentum,
    high,
    low,
    start,
    at,
    valid,
    HOW: tl.constexpr,
):
    """Accumulate a tile into `out`, and return it as written; if HOW is "given", return what `out` holds.

    `momentum` is the factor on the velocity, or for "fading" and "rounded" on the residual; None stands for 1.
    """
    if HOW == "given":
        written = tl.load(out + start + at, mask=valid)
    else:
        before = tl.load(residual + start + at, mask=valid)
        new = tl.load(gradient + start + at, mask=valid)
        if HOW == "rounded":
            kept = before.to(tl.float32)
            if momentum is not None:
                kept *= tl.load(momentum)
            after = _rounded(kept + tl.load(scale) * new.to(tl.float32), start + at, high, low)
        else:
            new = tl.load(scale) * wide(new.to(before.dtype))
            if HOW == "sum":
                after = wide(before) + new
            elif HOW == "fading":
                after = tl.load(momentum) * wide(before) + new
            else:
                moving = tl.load(momentum) * wide(tl.load(velocity + start + at, mask=valid)) + new
                kept = moving.to(before.dtype)
                tl.store(velocity_out + start + at, kept, mask=valid)
                if HOW == "nesterov":
                    after = wide(before) + new + tl.load(momentum) * wide(kept)
                else:
                    after = wide(before) + wide(kept)
        written = after.to(before.dtype)
        tl.store(out + start + at, written, mask=valid)
    return written


@triton.jit
def _rounded(x, index, high, low):
    """Round float32 to bfloat16 stochastically: add a random number to the bits that are then cut off."""
    bits = x.to(tl.int32, bitcast=True)
    drawn = (hash32(index, high, low) & 0xFFFF).to(tl.int32)
    rounded = ((bits + drawn) & -0x10000).to(tl.float32, bitcast=True)
    return tl.where((bits & 0x7FFFFFFF) < 0x7F800000, rounded, x)

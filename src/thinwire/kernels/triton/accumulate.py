"""What waits plus what is new."""

import triton
import triton.language as tl
from torch import Tensor

from thinwire.kernels.reference.accumulate import accumulate
from thinwire.kernels.triton.hashing import hash32
from thinwire.kernels.triton.launch import TILE, factor, launch, tiles_of, wide

__all__ = ["accumulate", "accumulate_as", "accumulate_momentum", "total"]


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
    """See `reference.accumulate_momentum`; torch's own `add` is as good as a kernel for `accumulate`."""
    tensors = (out, velocity_out, residual, velocity, gradient)
    factors = factor(out, scale), factor(out, momentum), 0, 0
    how = "nesterov" if nesterov else "momentum"
    launch(accumulate_as, tiles_of(out.numel()), *tensors, *factors, out.numel(), HOW=how, TILE=TILE, num_warps=8)


@triton.jit(do_not_specialize=["high", "low"])
def accumulate_as(
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
    """Write out what is accumulated of a tile, and return it as it was written; of "given", what `out` holds."""
    if HOW == "given":
        written = tl.load(out + start + at, mask=valid)
    else:
        before = tl.load(residual + start + at, mask=valid)
        new = tl.load(gradient + start + at, mask=valid)
        if HOW == "rounded":
            after = _rounded(before.to(tl.float32) + tl.load(scale) * new.to(tl.float32), start + at, high, low)
        else:
            new = tl.load(scale) * wide(new.to(before.dtype))
            if HOW == "sum":
                after = wide(before) + new
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
    """Round float32 to bfloat16 by lot: a random number is added to the bits that are then cut."""
    bits = x.to(tl.int32, bitcast=True)
    drawn = (hash32(index, high, low) & 0xFFFF).to(tl.int32)
    rounded = ((bits + drawn) & -0x10000).to(tl.float32, bitcast=True)
    return tl.where((bits & 0x7FFFFFFF) < 0x7F800000, rounded, x)

"""Numbers as codes of a few bits, and back."""

import triton
import triton.language as tl
from torch import Tensor

from thinwire.kernels.codes.reference import OffsetGrid, Rounding
from thinwire.kernels.hashing.triton import hash32, signed_keys
from thinwire.kernels.triton import launch, tiles_of

_BLOCK = 1024


def offset_encode(
    codes: Tensor, x: Tensor, scales: Tensor, group: int, grid: OffsetGrid, rounding: Rounding, seed: int
) -> None:
    """See `reference.offset_encode`."""
    args = (codes, x, scales, x.numel(), group, *signed_keys(seed))
    limits = {"BASE": grid.base, "POSITIVES": grid.positives, "NEGATIVES": grid.negatives, "SHIFT": grid.shift}
    launch(_offset, tiles_of(x.numel(), _BLOCK), *args, ROUNDING=rounding, BLOCK=_BLOCK, **limits)


def levels_encode(codes: Tensor, x: Tensor, scales: Tensor, group: int, levels: int, seed: int) -> None:
    """See `reference.levels_encode`."""
    args = (codes, x, scales, x.numel(), group, *signed_keys(seed))
    launch(_levels, tiles_of(x.numel(), _BLOCK), *args, LEVELS=levels, BLOCK=_BLOCK)


def ternary_encode(codes: Tensor, x: Tensor, scales: Tensor, group: int, seed: int) -> None:
    """See `reference.ternary_encode`."""
    args = (codes, x, scales, x.numel(), group, *signed_keys(seed))
    launch(_ternary, tiles_of(x.numel(), _BLOCK), *args, BLOCK=_BLOCK)


def table_decode(out: Tensor, codes: Tensor, table: Tensor, scales: Tensor, group: int) -> None:
    """See `reference.table_decode`."""
    args = (out, codes, table, scales, codes.numel(), group)
    launch(_decode, tiles_of(codes.numel(), _BLOCK), *args, LAST=table.numel() - 1, BLOCK=_BLOCK)


@triton.jit
def _given(x, scales, n, group, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    scale = tl.load(scales + at.to(tl.uint32) // group.to(tl.uint32), mask=at < n, other=1.0)
    return at, tl.load(x + at, mask=at < n, other=0.0), scale


@triton.jit
def _uniform(noise):
    return (noise >> 8).to(tl.float32) * 5.9604644775390625e-08  # 2⁻²⁴


@triton.jit
def _write(codes, at, n, scale, found):
    tl.store(codes + at, tl.where(scale != scale, 0, found).to(codes.dtype.element_ty), mask=at < n)


@triton.jit(do_not_specialize=["group", "high", "low"])
def _offset(
    codes,
    x,
    scales,
    n,
    group,
    high,
    low,
    SHIFT: tl.constexpr,
    BASE: tl.constexpr,
    POSITIVES: tl.constexpr,
    NEGATIVES: tl.constexpr,
    ROUNDING: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at, value, scale = _given(x, scales, n, group, BLOCK)
    bits = tl.div_rn(value, scale).to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    size = magnitude.to(tl.float32, bitcast=True)
    first = tl.full([BLOCK], BASE << SHIFT, tl.int32).to(tl.float32, bitcast=True)
    if ROUNDING == "truncate":
        rounded = magnitude >> SHIFT
    elif ROUNDING == "nearest":
        rounded = (magnitude + ((1 << SHIFT) >> 1)) >> SHIFT
        rounded = tl.maximum(rounded, tl.where(size >= first / 2, BASE, 0))
    else:
        noise = hash32(at, high, low)
        rounded = (magnitude + (noise & ((1 << SHIFT) - 1)).to(tl.int32)) >> SHIFT
        upwards = tl.where(_uniform(noise) * first < size, BASE, 0)
        rounded = tl.where(magnitude < (BASE << SHIFT), upwards, rounded)
    index = tl.maximum(rounded - (BASE - 1), 0)
    negative = tl.where(index > 0, tl.minimum(index, NEGATIVES) + POSITIVES, 0)
    _write(codes, at, n, scale, tl.where(bits < 0, negative, tl.minimum(index, POSITIVES)))


@triton.jit(do_not_specialize=["group", "high", "low"])
def _levels(codes, x, scales, n, group, high, low, LEVELS: tl.constexpr, BLOCK: tl.constexpr):
    at, value, scale = _given(x, scales, n, group, BLOCK)
    exact = tl.div_rn(value, scale) * LEVELS
    exact = tl.where(exact > LEVELS, LEVELS, tl.where(exact < -LEVELS, -LEVELS, exact))
    exact = tl.where(exact == exact, exact, 0)  # NaN has no code, and its scale is NaN too
    lower = tl.floor(exact)
    upwards = _uniform(hash32(at, high, low)) < exact - lower
    _write(codes, at, n, scale, lower.to(tl.int32) + LEVELS + upwards.to(tl.int32))


@triton.jit(do_not_specialize=["group", "high", "low"])
def _ternary(codes, x, scales, n, group, high, low, BLOCK: tl.constexpr):
    at, value, scale = _given(x, scales, n, group, BLOCK)
    chosen = _uniform(hash32(at, high, low)) * scale < tl.abs(value)
    _write(codes, at, n, scale, tl.where(chosen, tl.where(value < 0, 2, 1), 0))


@triton.jit(do_not_specialize=["group"])
def _decode(out, codes, table, scales, n, group, LAST: tl.constexpr, BLOCK: tl.constexpr):
    at, code, scale = _given(codes, scales, n, group, BLOCK)
    value = tl.load(table + (code.to(tl.int32) & LAST), mask=at < n, other=0.0) * scale
    tl.store(out + at, value.to(out.dtype.element_ty), mask=at < n)

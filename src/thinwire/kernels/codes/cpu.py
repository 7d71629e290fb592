"""Numbers as codes of a few bits, and back.

The loops take elements lo to hi, group after group. Every code is computed without a branch, so that the loop over a
group vectorises. Codes must equal those of the reference, so nothing is contracted.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import types
from torch import Tensor

from thinwire.kernels.accumulate.reference import joined
from thinwire.kernels.bits.cpu import unpack
from thinwire.kernels.blocks.cpu import group_scales, part_of_group
from thinwire.kernels.blocks.reference import Norm
from thinwire.kernels.codes import reference
from thinwire.kernels.codes.reference import How, OffsetGrid, Packed, UniformGrid
from thinwire.kernels.compiled import exactly, overload
from thinwire.kernels.exact.cpu import add, put
from thinwire.kernels.hashing.cpu import draw
from thinwire.kernels.hashing.reference import keys
from thinwire.kernels.memory import empty
from thinwire.kernels.parts import Groups, Ints, Parts
from thinwire.kernels.places.cpu import differ
from thinwire.kernels.ranges import map_groups, map_ranges

_ALIGN, _TILE = 64, 2048


class _Offset(NamedTuple):
    """An `OffsetGrid`. From the magnitude `first` on, numbers below the smallest are rounded up to it."""

    shift: Any
    base: Any
    positives: Any
    negatives: Any
    half: Any
    first: Any


class _Stochastic(NamedTuple):
    """An `OffsetGrid` that is rounded stochastically, and its smallest number."""

    shift: Any
    base: Any
    positives: Any
    negatives: Any
    smallest: Any


def codes_encode(
    codes: Tensor, x: Tensor, scales: Tensor, groups: Groups, how: How, seeds: Ints, *decoded: Tensor
) -> None:
    found, given = codes.numpy(), x.numpy()
    if how == "sign":
        map_ranges(lambda lo, hi: _sign_loop(found[lo:hi], given[lo:hi]), x.numel(), align=_ALIGN)
    else:
        drawn = np.array([keys(seed) for seed in seeds], np.uint32)
        _over_pieces(_encode_loop, groups, found, given, scales.numpy(), drawn, _numbers(how))
    if decoded:
        table, out = decoded
        table_decode(out, codes, table, scales, groups)


def scaled_encode(
    codes: Tensor, xs: Parts, groups: Groups, norm: Norm, how: How, seeds: Ints, factor: float, *decoded: Tensor
) -> Tensor:
    x = reference.times(joined(xs, torch.float32), factor)
    scales = group_scales(x, groups, *norm)
    codes_encode(codes, x, scales, groups, how, seeds, *decoded)
    return scales


def _numbers(how: How) -> _Offset | _Stochastic | UniformGrid | None:
    """Return how to encode in numbers of 32 bits, by whose type the loop is chosen: None is ternary."""
    if not isinstance(how, OffsetGrid):
        return how if isinstance(how, UniformGrid) else None
    shift, base, positives, negatives = (np.int32(each) for each in how[:4])
    smallest = np.int32(how.base << how.shift).view(np.float32)
    if how.rounding == "stochastic":
        return _Stochastic(shift, base, positives, negatives, smallest)
    half, first = ((1 << how.shift) >> 1, smallest / 2) if how.rounding == "nearest" else (0, np.inf)
    return _Offset(shift, base, positives, negatives, np.int32(half), np.float32(first).view(np.int32))


def table_decode(out: Tensor, codes: Tensor, table: Tensor, scales: Tensor, groups: Groups) -> None:
    wide = out if out.dtype in (torch.float32, torch.float64) else empty(out.numel(), torch.float32, out.device)
    _over_pieces(_decode_loop, groups, wide.numpy(), codes.numpy(), scales.numpy(), table.numpy())
    if wide is not out:
        out.copy_(wide)


def numbers_read(
    rows: Tensor, at: Packed, table: Tensor, groups: Groups, dtype: torch.dtype, wrong: Sequence[Tensor],
    fixed: Tensor, summed: bool, out: Tensor | Parts | None = None, flags: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See `reference.numbers_read`. Codes are unpacked, decoded and summed tile by tile."""
    compiled = at.bits and dtype in (torch.float32, torch.float64)
    if not compiled or flags is not None or isinstance(out, Parts):  # the last two only a GPU's sums ask for
        return reference.numbers_read(rows, at, table, groups, dtype, wrong, fixed, summed, out, flags)
    if out is not None and out.dtype != dtype:
        numbers, flags = numbers_read(rows, at, table, groups, dtype, wrong, fixed, summed)
        return out.copy_(numbers), flags
    flags, count = torch.cat([differ(rows, fixed).view(1), *wrong]), sum(groups.runs)
    found = empty(count if summed else len(rows) * count, dtype, rows.device) if out is None else out.view(-1)
    scales = rows[:, at.scales : at.scales + 4 * sum(groups.counts)].contiguous().view(torch.float32)
    arrays = (found.view(-1, count).numpy(), rows.numpy(), at.codes, scales.numpy(), table.numpy())
    _over_pieces(_reading(at.bits), groups, *arrays)
    if flags.any():
        found.zero_()
    return found if summed else found.view(-1, count), flags


def _over_pieces(loop: Callable[..., None], groups: Groups, *arrays: Any) -> None:
    pieces = groups.pieces(_ALIGN)
    map_groups(lambda first, last: loop(pieces[first:last], *arrays), pieces[:, 5] - pieces[:, 4])


@exactly
def _of_piece(pieces, at, out, x, scales):
    # The run's part of the arrays, from where the run begins; its groups' width, and the piece's ends.
    _, begin, first, group, lo, hi = pieces[at]
    return out[begin:], x[begin:], scales[first:], group, lo, hi


@exactly
def _cut(magnitude, shift):
    # The mask tells LLVM that the shift is below 32, so that it needs no 64 bits.
    return np.int32(np.uint32(magnitude) >> (np.uint32(shift) & np.uint32(31)))


@exactly
def _drawn(noise):
    return np.float32(np.int32(noise >> np.uint32(8))) * np.float32(2.0**-24)


@exactly
def _inverse(scale):
    # The inverse of a power of two is exact, so a product with it is exact whenever the quotient would be.
    return np.float32(np.float32(1) / scale)


@exactly
def _encode_loop(pieces, every_code, every_x, every_scale, keys, how):
    for at in range(len(pieces)):
        codes, x, scales, group, lo, hi = _of_piece(pieces, at, every_code, every_x, every_scale)
        high, low = keys[pieces[at, 0], 0], keys[pieces[at, 0], 1]
        for g in range(lo // group, -(-hi // group)):
            start, stop = part_of_group(group, g, lo, hi)
            if np.isnan(scales[g]):
                codes[start:stop] = 0
            else:
                _encode(codes[start:stop], x[start:stop], scales[g], how, np.uint32(high + start), low)


def _encode(codes: Any, x: Any, scale: Any, how: Any, high: Any, low: Any) -> None:
    """Write the codes of a group's part: the loop for the type of `how`."""


@overload(_encode, inline="always")
def _encode_as(codes, x, scale, how, high, low):
    if isinstance(how, types.NoneType):
        return lambda codes, x, scale, how, high, low: _ternary(codes, x, scale, high, low)
    if how.instance_class is UniformGrid:
        return lambda codes, x, scale, how, high, low: _uniform(codes, x, scale, how, high, low)
    if how.instance_class is _Stochastic:
        return lambda codes, x, scale, how, high, low: _offset_stochastic(codes, x, _inverse(scale), how, high, low)
    return lambda codes, x, scale, how, high, low: _offset(codes, x, _inverse(scale), how)


@exactly
def _numbered(rounded, negative, base, positives, negatives):
    # In Numba, 32-bit numbers add to 64 bits, so every sum is cut back to 32.
    index = max(np.int32(rounded - base + 1), np.int32(0))
    below = np.int32(min(index, negatives) + positives) if index > 0 else np.int32(0)
    return below if negative else min(index, positives)


@exactly
def _offset(codes, x, inverse, grid):
    shift, base, positives, negatives, half, first = grid
    for i in range(x.size):
        ratio = np.float32(x[i] * inverse)
        bits = np.float32(ratio).view(np.int32)
        magnitude = np.int32(bits & np.int32(0x7FFFFFFF))
        rounded = _cut(np.int32(magnitude + half), shift)
        rounded = max(rounded, base if magnitude >= first else np.int32(0))
        codes[i] = _numbered(rounded, bits < 0, base, positives, negatives)


@exactly
def _offset_stochastic(codes, x, inverse, grid, high, low):
    shift, base, positives, negatives, smallest = grid
    last = np.int32((np.int32(1) << shift) - 1)
    for i in range(x.size):
        ratio = np.float32(x[i] * inverse)
        bits = np.float32(ratio).view(np.int32)
        magnitude = np.int32(bits & np.int32(0x7FFFFFFF))
        noise = draw(i, high, low)
        rounded = _cut(np.int32(magnitude + np.int32(np.int32(noise) & last)), shift)
        upwards = base if _drawn(noise) * smallest < abs(ratio) else np.int32(0)
        rounded = upwards if abs(ratio) < smallest else rounded
        codes[i] = _numbered(rounded, bits < 0, base, positives, negatives)


@exactly
def _uniform(codes, x, scale, grid, high, low):
    levels = np.float32(grid.levels)
    for i in range(x.size):
        exact = min(max(x[i] / scale * levels, -levels), levels)
        lower = np.floor(exact)
        upwards = (np.float32(0.5) if grid.nearest else _drawn(draw(i, high, low))) < exact - lower
        codes[i] = np.int32(lower + levels) + np.int32(upwards)


@exactly
def _ternary(codes, x, scale, high, low):
    for i in range(x.size):
        chosen = _drawn(draw(i, high, low)) * scale < abs(x[i])
        codes[i] = np.int32(chosen) << np.int32(x[i] < 0)


@exactly
def _sign_loop(codes, x):
    for i in range(x.size):
        codes[i] = x[i] < 0


@exactly
def _decode(out, codes, table, last, scale):
    for i in range(codes.size):
        out[i] = table[np.uint32(codes[i]) & last] * scale


@exactly
def _decode_loop(pieces, every_out, every_code, every_scale, table):
    last = np.uint32(table.size - 1)
    for at in range(len(pieces)):
        out, codes, scales, group, lo, hi = _of_piece(pieces, at, every_out, every_code, every_scale)
        for g in range(lo // group, -(-hi // group)):
            start, stop = part_of_group(group, g, lo, hi)
            _decode(out[start:stop], codes[start:stop], table, last, scales[g])


@cache
def _reading(bits: int) -> Callable[..., None]:
    """Return a loop that writes what each row's packed codes stand for, or their sum if there is room for one row."""

    @exactly
    def loop(pieces, every_out, rows, offset, every_scale, table):
        codes, numbers = np.empty(_TILE + 8, np.int32), np.empty(_TILE, every_out.dtype)
        last, summed = np.uint32(table.size - 1), every_out.shape[0] < rows.shape[0]
        for at in range(len(pieces)):
            _, begin, first, group, low, high = pieces[at]
            for lo in range(low, high, _TILE):
                hi = min(lo + _TILE, high)
                skipped = (begin + lo) % 8
                for rank in range(rows.shape[0]):
                    packed = rows[rank, offset + (begin + lo) // 8 * bits :]
                    unpack(packed, bits, 0, skipped + hi - lo, codes)
                    for g in range(lo // group, -(-hi // group)):
                        start, stop = part_of_group(group, g, lo, hi)
                        part = codes[skipped + start - lo : skipped + stop - lo]
                        _decode(numbers[start - lo : stop - lo], part, table, last, every_scale[rank, first + g])
                    out = every_out[0 if summed else rank, begin + lo : begin + hi]
                    if summed and rank:
                        add(out, numbers[: hi - lo])
                    else:
                        put(out, numbers[: hi - lo])

    return loop

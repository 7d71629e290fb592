"""Numbers as codes of a few bits, and back.

`x` is float32 (n), `codes` uint8 or int16 (n), written in place, and `scales` float32: one for each of `groups`.
If a group's scale is NaN, its codes are 0. The random number of a run's element i is `mix(i, seed)`, with a seed for
each run, so every backend draws the same; its highest 24 bits serve as a number u from [0, 1).
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from thinwire.kernels.accumulate.reference import joined
from thinwire.kernels.bits.reference import unpack_bits
from thinwire.kernels.blocks.reference import Norm, group_scales
from thinwire.kernels.exact.reference import row_sums
from thinwire.kernels.hashing.reference import mix
from thinwire.kernels.parts import Groups, Ints, Parts
from thinwire.kernels.places.reference import differ

Rounding = Literal["truncate", "nearest", "stochastic"]


class OffsetGrid(NamedTuple):
    """Numbers whose float32 bit patterns, without the sign, start at base << shift and go in steps of 1 << shift.

    Code 0 is zero. Codes 1 to `positives` are the first numbers of the grid, and the next `negatives` codes are the
    same numbers with a minus sign. Values beyond the last number become the last.

    The scales are powers of two, and normal numbers. Between two numbers of the grid, "truncate" drops the lowest
    `shift` bits of the pattern; "nearest" adds half a step first, and "stochastic" as many bits of `mix`. Below the
    grid's first number, "truncate" gives zero, "nearest" the first number from half of it on, and "stochastic" the
    first number if u times it is below x / scale.
    """

    shift: int
    base: int
    positives: int
    negatives: int
    rounding: Rounding = "truncate"


class UniformGrid(NamedTuple):
    """The code is s + ⌊y⌋ + (u < y − ⌊y⌋) for y = x / scale · s, cut to −s..s (s = `levels`, in float32 throughout).

    `nearest`: u is ½.
    """

    levels: int
    nearest: bool = False


class Packed(NamedTuple):
    """Where numbers are in a row of bytes: scales from one place on, packed codes of so many bits from another.

    Plain numbers, of 0 bits, have no scales.
    """

    scales: int
    codes: int
    bits: int


class Arrived(NamedTuple):
    """Numbers of a dtype where they lie in rows, and what these must be: the first arguments of `numbers_read`."""

    rows: Tensor
    at: Packed
    table: Tensor
    groups: Groups
    dtype: torch.dtype
    wrong: Sequence[Tensor]
    fixed: Tensor


How = OffsetGrid | UniformGrid | Literal["ternary", "sign"]
"""Which code a number gets. Ternary: 0 unless u · scale < |x|; else 1 for plus and 2 for minus. Sign: 1 where x < 0.

Signs are written whatever the scale.
"""


def codes_encode(
    codes: Tensor, x: Tensor, scales: Tensor, groups: Groups, how: How, seeds: Ints, *decoded: Tensor
) -> None:
    """Write the code of each number; with a table and room, also what `table_decode` makes of it."""
    for (place, part, some, width), seed in zip(groups.parts(codes, x, scales=scales), seeds, strict=True):
        if how == "sign":
            torch.lt(part, 0, out=place)
            continue
        each = _each(some, width, part)
        if isinstance(how, OffsetGrid):
            found = _offset(part / each, how, seed)
        elif isinstance(how, UniformGrid):
            found = _uniform(part / each, how, seed)
        else:
            found = torch.where(part < 0, 2, 1) * (_drawn(part, seed).mul_(each) < part.abs())
        place.copy_(torch.where(each.isnan(), 0, found))
    if decoded:
        table, out = decoded
        table_decode(out, codes, table, scales, groups)


def scaled_encode(
    codes: Tensor, xs: Parts, groups: Groups, norm: Norm, how: How, seeds: Ints, factor: float, *decoded: Tensor
) -> Tensor:
    """Do what `codes_encode` does of vectors, float32 by then, times a factor. Return the scales: `group_scales`."""
    x = times(joined(xs, torch.float32), factor)
    scales = group_scales(x, groups, *norm)
    codes_encode(codes, x, scales, groups, how, seeds, *decoded)
    return scales


def times(x: Tensor, factor: float) -> Tensor:
    """Return a vector times a factor; itself if that is 1."""
    return x if factor == 1 else x * factor


def _offset(ratio: Tensor, grid: OffsetGrid, seed: int) -> Tensor:
    bits = ratio.view(torch.int32)
    index = _rounded(bits & 0x7FFFFFFF, grid, seed).sub_(grid.base - 1).clamp_(min=0)
    negative = index.clamp(max=grid.negatives).add_(grid.positives).mul_(index > 0)
    return torch.where(bits < 0, negative, index.clamp(max=grid.positives))


def _rounded(magnitudes: Tensor, grid: OffsetGrid, seed: int) -> Tensor:
    if grid.rounding == "truncate":
        return magnitudes >> grid.shift
    first = torch.tensor(grid.base << grid.shift, dtype=torch.int32, device="cpu").view(torch.float32).item()
    if grid.rounding == "nearest":
        rounded = (magnitudes + ((1 << grid.shift) >> 1)) >> grid.shift
        return torch.maximum(rounded, (magnitudes.view(torch.float32) >= first / 2) * grid.base)
    noise = (_noise(magnitudes, seed) & ((1 << grid.shift) - 1)).to(torch.int32)
    upwards = _drawn(magnitudes, seed) * first < magnitudes.view(torch.float32)
    rounded = (magnitudes + noise) >> grid.shift
    return torch.where(magnitudes < grid.base << grid.shift, upwards * grid.base, rounded)


def _uniform(ratio: Tensor, grid: UniformGrid, seed: int) -> Tensor:
    exact = ratio.mul_(grid.levels).clamp_(-grid.levels, grid.levels)
    lower = exact.floor()
    upwards = (0.5 if grid.nearest else _drawn(exact, seed)) < exact - lower
    return lower.add_(grid.levels).add_(upwards)


def table_decode(out: Tensor, codes: Tensor, table: Tensor, scales: Tensor, groups: Groups) -> None:
    """Write table[code] · scale, a product of float32, to `out` (n, any floating-point dtype).

    The table (float32) has 2^b entries; only the lowest b bits of a code count.
    """
    for place, part, some, group in groups.parts(out, codes, scales=scales):
        places = part.to(torch.int32) & (table.numel() - 1)
        place.copy_(table.index_select(0, places).mul_(_each(some, group, part)))


def numbers_read(
    rows: Tensor, at: Packed, table: Tensor, groups: Groups, dtype: torch.dtype, wrong: Sequence[Tensor],
    fixed: Tensor, summed: bool, out: Tensor | Parts | None = None, flags: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the numbers in each of uint8 `rows` (ranks, bytes): (ranks, n), or `summed` as `row_sums` does.

    Codes are decoded by `table_decode`. If rows `differ` from what is fixed, or any of the `wrong` (bools) is set, all
    numbers are 0. Both are returned, too, as one tensor: `flags`, if that is given. The numbers are written to `out`,
    if there is one, and it is what is returned; of vectors that lie apart, the whole that they lie in.
    """
    found_wrong, count = torch.cat([differ(rows, fixed).view(1), *wrong]), sum(groups.runs)
    flags = found_wrong if flags is None else flags.copy_(found_wrong)
    found = torch.empty(rows.shape[0], count, dtype=dtype, device=rows.device)
    if not at.bits:
        found.view(torch.uint8).copy_(rows[:, at.codes : at.codes + count * dtype.itemsize])
    else:
        scales = rows[:, at.scales : at.scales + 4 * sum(groups.counts)].clone().view(torch.float32)
        for each, row, some in zip(found, rows, scales, strict=True):
            codes = unpack_bits(row[at.codes :], count, at.bits, torch.int32)
            table_decode(each, codes, table, some, groups)
    numbers = (row_sums(found) if summed else found).masked_fill_(flags.any(), 0)
    if isinstance(out, Parts):
        torch._foreach_copy_(list(out), list(numbers.split(out.cut.lengths)))
        return out.flat, flags
    return numbers if out is None else out.copy_(numbers), flags


def _each(scales: Tensor, group: int, like: Tensor) -> Tensor:
    """Return the scale of each element."""
    return scales.repeat_interleave(min(group, like.numel()))[: like.numel()]


def _noise(like: Tensor, seed: int) -> Tensor:
    return mix(torch.arange(like.numel(), dtype=torch.int32, device=like.device), seed)


def _drawn(like: Tensor, seed: int) -> Tensor:
    return (_noise(like, seed) >> 8).to(torch.float32).mul_(2.0**-24)

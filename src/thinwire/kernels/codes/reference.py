"""Numbers as codes of a few bits, and back.

`x` is float32 (n), `codes` uint8 or int16 (n), written in place, and `scales` float32: one for each of `groups`.
If a group's scale is NaN, its codes are 0. The random number of a run's element i is `mix(i, seed)`, with a seed for
each run, so every backend draws the same; its highest 24 bits serve as a number u from [0, 1).
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from thinwire.kernels.groups import Groups
from thinwire.kernels.hashing.reference import mix

Rounding = Literal["truncate", "nearest", "stochastic"]


class OffsetGrid(NamedTuple):
    """Numbers whose float32 bit patterns, without the sign, start at base << shift and go in steps of 1 << shift.

    Code 0 is zero. Codes 1 to `positives` are the first numbers of the grid, and the next `negatives` codes are the
    same numbers with a minus sign.
    """

    shift: int
    base: int
    positives: int
    negatives: int


def offset_encode(
    codes: Tensor,
    x: Tensor,
    scales: Tensor,
    groups: Groups,
    grid: OffsetGrid,
    rounding: Rounding,
    seeds: Sequence[int],
) -> None:
    """Round x / scale to a number of the grid and write its code. Values beyond the last number become the last.

    The scales are powers of two, and normal numbers. Between two numbers of the grid, "truncate" drops the lowest
    `shift` bits of the pattern; "nearest" adds half a step first, and "stochastic" as many bits of `mix`. Below the
    grid's first number, "truncate" gives zero, "nearest" the first number from half of it on, and "stochastic" the
    first number if u times it is below x / scale.
    """
    for (out, part, some, width), seed in zip(groups.parts(codes, x, scales=scales), seeds, strict=True):
        _offset(out, part, some, width, grid, rounding, seed)


def _offset(
    codes: Tensor, x: Tensor, scales: Tensor, group: int, grid: OffsetGrid, rounding: Rounding, seed: int
) -> None:
    bits = (x / _each(scales, group, x)).view(torch.int32)
    index = _rounded(bits & 0x7FFFFFFF, grid, rounding, seed).sub_(grid.base - 1).clamp_(min=0)
    negative = index.clamp(max=grid.negatives).add_(grid.positives).mul_(index > 0)
    _write(codes, torch.where(bits < 0, negative, index.clamp(max=grid.positives)), scales, group)


def _rounded(magnitudes: Tensor, grid: OffsetGrid, rounding: Rounding, seed: int) -> Tensor:
    if rounding == "truncate":
        return magnitudes >> grid.shift
    first = torch.tensor(grid.base << grid.shift, dtype=torch.int32).view(torch.float32).item()
    if rounding == "nearest":
        rounded = (magnitudes + ((1 << grid.shift) >> 1)) >> grid.shift
        return torch.maximum(rounded, (magnitudes.view(torch.float32) >= first / 2) * grid.base)
    noise = _noise(magnitudes, seed)
    rounded = (magnitudes + (noise & ((1 << grid.shift) - 1)).to(torch.int32)) >> grid.shift
    upwards = _uniform(noise) * first < magnitudes.view(torch.float32)
    return torch.where(magnitudes < grid.base << grid.shift, upwards * grid.base, rounded)


def levels_encode(
    codes: Tensor,
    x: Tensor,
    scales: Tensor,
    groups: Groups,
    levels: int,
    seeds: Sequence[int],
    nearest: bool = False,
) -> None:
    """Write s + ⌊y⌋ + (u < y − ⌊y⌋) for y = x / scale · s, cut to −s..s (s = `levels`, in float32 throughout).

    `nearest`: u is ½.
    """
    for (out, part, some, width), seed in zip(groups.parts(codes, x, scales=scales), seeds, strict=True):
        _levels(out, part, some, width, levels, None if nearest else seed)


def _levels(codes: Tensor, x: Tensor, scales: Tensor, group: int, levels: int, seed: int | None) -> None:
    exact = (x / _each(scales, group, x)).mul_(levels).clamp_(-levels, levels)
    lower = exact.floor()
    upwards = (0.5 if seed is None else _uniform(_noise(x, seed))) < exact - lower
    _write(codes, lower.add_(levels).add_(upwards), scales, group)


def ternary_encode(codes: Tensor, x: Tensor, scales: Tensor, groups: Groups, seeds: Sequence[int]) -> None:
    """Write 0 unless u · scale < |x|; else 1 for plus and 2 for minus."""
    for (out, part, some, width), seed in zip(groups.parts(codes, x, scales=scales), seeds, strict=True):
        _ternary(out, part, some, width, seed)


def _ternary(codes: Tensor, x: Tensor, scales: Tensor, group: int, seed: int) -> None:
    chosen = _uniform(_noise(x, seed)).mul_(_each(scales, group, x)) < x.abs()
    _write(codes, torch.where(x < 0, 2, 1) * chosen, scales, group)


def sign_encode(codes: Tensor, x: Tensor) -> None:
    """Write 1 where x < 0, else 0."""
    codes.copy_(x < 0)


def table_decode(out: Tensor, codes: Tensor, table: Tensor, scales: Tensor, groups: Groups) -> None:
    """Write table[code] · scale, a product of float32, to `out` (n, any floating-point dtype).

    The table (float32) has 2^b entries; only the lowest b bits of a code count.
    """
    for place, part, some, group in groups.parts(out, codes, scales=scales):
        places = part.to(torch.int32) & (table.numel() - 1)
        place.copy_(table.index_select(0, places).mul_(_each(some, group, part)))


def _write(codes: Tensor, found: Tensor, scales: Tensor, group: int) -> None:
    codes.copy_(torch.where(_each(scales, group, codes).isnan(), 0, found))


def _each(scales: Tensor, group: int, like: Tensor) -> Tensor:
    """Return the scale of each element."""
    return scales.repeat_interleave(min(group, like.numel()))[: like.numel()]


def _noise(like: Tensor, seed: int) -> Tensor:
    return mix(torch.arange(like.numel(), dtype=torch.int32, device=like.device), seed)


def _uniform(noise: Tensor) -> Tensor:
    return (noise >> 8).to(torch.float32).mul_(2.0**-24)

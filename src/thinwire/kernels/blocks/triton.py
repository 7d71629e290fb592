"""Blocks of adjacent elements."""

import math
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.kernels.blocks import reference
from thinwire.kernels.memory import constant
from thinwire.kernels.parts import Groups, Ints
from thinwire.kernels.select.triton import largest
from thinwire.kernels.triton import TILE, launch, magnitudes, tiles_of, tiles_of_each, wide

_COLUMNS, _WIDEST = 1024, 1 << 15


def block_energies(x: Tensor, width: int) -> Tensor:
    energies = x.new_empty(tiles_of(x.numel(), width))
    columns = min(_COLUMNS, triton.next_power_of_2(width))
    rows = TILE // columns
    launch(_energies, tiles_of(energies.numel(), rows), x, x.numel(), width, energies, ROWS=rows, COLUMNS=columns)
    return energies


def largest_blocks(x: Tensor, width: int, k: int) -> Tensor:
    return largest(block_energies(x, width), k)


def largest_in_rows(x: Tensor, width: int, k: int) -> Tensor:
    """See `reference.largest_in_rows`, which also runs here for rows too wide for one program's registers."""
    if width > _WIDEST:
        return reference.largest_in_rows(x, width, k)
    rows = x.numel() // width
    out = torch.empty(rows * k, dtype=torch.int32, device=x.device)
    columns = triton.next_power_of_2(width)
    sizes = {"BITS": 8 * x.element_size() - 1, "COLUMNS": columns, "num_warps": min(16, max(1, columns // 256))}
    launch(_pick, rows if k else 0, x, out, width, k, **sizes)
    return out


def group_norms(x: Tensor, groups: Groups, order: float) -> Tensor:
    """See `reference.group_norms`. A whole run is cut into pieces, and the norm of their norms is taken.

    So a norm depends on nothing but its group. Groups of a size beyond a tile are left to the reference.
    """
    if (groups.size or 0) > TILE:
        return reference.group_norms(x, groups, order)
    return _norms(x, x, groups, order, None)


def group_scales(
    x: Tensor, groups: Groups, order: float, widths: Tensor | None, zero: float, clip: float | None = None
) -> Tensor:
    """See `reference.group_scales`, and `group_norms`."""
    if (groups.size or 0) > TILE:
        return reference.group_scales(x, groups, order, widths, zero, clip)
    return _norms(x, x, groups, order, (widths, zero, clip or 0.0))


def _norms(
    x: Tensor, y: Tensor, groups: Groups, order: float, scaled: tuple[Tensor | None, float, float] | None
) -> Tensor:
    """Return the norms of x, or the scales that follow from them. With a clip, those of y are of order 2."""
    pieces = pieces_of(groups)
    last = groups.size is not None or max(pieces.counts) < 2
    out, also = of_pieces(x, y, pieces, order, scaled, last=last)
    return out if last else _norms(out, out if also is None else also, Groups(pieces.counts), order, scaled)


def pieces_of(groups: Groups) -> Groups:
    """Return the groups, or the pieces of whole runs."""
    return Groups(groups.runs, groups.size or TILE)


def of_pieces(
    x: Tensor, y: Tensor, pieces: Groups, order: float, scaled: tuple[Tensor | None, float, float] | None, *,
    last: bool, factor: float | None = None, at: Ints | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Return norms, and with a clip those of order 2; of the last level the scales, if they are wanted."""
    size, device, (widths, zero, clip) = pieces.size or TILE, x.device, scaled or (None, 0.0, 0.0)
    columns = triton.next_power_of_2(size)
    out = torch.empty(sum(pieces.counts), dtype=torch.float32 if last and scaled else torch.float64, device=device)
    also = torch.empty_like(out) if clip and not last else None
    tiles = tiles_of_each(pieces.counts, device, TILE // columns)
    begins, firsts = (list(accumulate(lengths, initial=0))[:-1] for lengths in (pieces.runs, pieces.counts))
    table = (constant(tuple(each), torch.int64, device) for each in (at or begins, pieces.runs, firsts, pieces.widths))
    how = {"ORDER": 0 if order == math.inf else int(order), "SCALED": bool(last and scaled), "ZERO": zero, "CLIP": clip}
    args = (out, also, x, y, factor, widths if last else None, *table, tiles)
    launch(_group_norms, len(tiles), *args, **how, ROWS=TILE // columns, COLUMNS=columns, num_warps=8)
    return out, also


@triton.jit
def factored(x, factor, inside):
    """Return numbers times a factor, in float32 or wider; those outside are 0."""
    value = wide(tl.load(x, mask=inside, other=0.0))
    if factor is not None:
        value *= factor
    return value


@triton.jit
def norm_at(x, factor, inside, ORDER: tl.constexpr):
    """Return the norm of each row. ORDER 0 is the largest magnitude. As an integer it is NaN's where there is one."""
    value = factored(x, factor, inside)
    if ORDER == 0:
        norm = tl.max(magnitudes(value), 1).to(value.dtype, bitcast=True).to(tl.float64)
    elif ORDER == 1:
        norm = tl.sum(tl.abs(value.to(tl.float64)), 1)
    else:
        norm = tl.sqrt(tl.sum(value.to(tl.float64) * value.to(tl.float64), 1))
    return norm


@triton.jit
def scale_of(norm, spread, widths, there, ZERO: tl.constexpr, CLIP: tl.constexpr):
    """Return scales; `spread` is the norm of order 2."""
    if widths is not None:
        many = tl.load(widths, mask=there, other=1.0)
        if CLIP == 0:
            norm /= many
    finite = norm < 3.4028235677973366e38  # 2¹²⁸ − 2¹⁰³, which float32 rounds up to infinity
    scale = tl.where(finite, norm, float("nan")).to(tl.float32)
    scale = tl.where(scale == 0, ZERO, scale)
    if CLIP > 0:
        bound = (CLIP * (spread / tl.sqrt(many))).to(tl.float32)
        scale = tl.where((bound < scale) | (bound != bound), bound, scale)
    return scale


@triton.jit
def _group_norms(
    out, also, x, y, factor, widths, begin, size, first, width, tiles,
    ORDER: tl.constexpr, SCALED: tl.constexpr, ZERO: tl.constexpr, CLIP: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    run = tl.load(tiles + 3 * tl.program_id(0))
    group = tl.load(tiles + 3 * tl.program_id(0) + 1).to(tl.int64) + tl.arange(0, ROWS)
    columns, n = tl.load(width + run), tl.load(size + run)
    column = tl.arange(0, COLUMNS)[None, :]
    at = group[:, None] * columns + column
    inside, there = (column < columns) & (at < n), group * columns < n
    place = tl.load(first + run) + group
    norm = norm_at(x + tl.load(begin + run) + at, factor, inside, ORDER)
    spread = norm
    if CLIP > 0:
        spread = norm_at(y + tl.load(begin + run) + at, factor, inside, 2)
        if also is not None:
            tl.store(also + place, spread, mask=there)
    if SCALED:
        widths = widths if widths is None else widths + place
        tl.store(out + place, scale_of(norm, spread, widths, there, ZERO, CLIP), mask=there)
    else:
        tl.store(out + place, norm, mask=there)


@triton.jit
def _energies(x, n, width, energies, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    block = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)[None, :]
    begin = block * width
    sums = wide(tl.zeros([ROWS, COLUMNS], energies.dtype.element_ty))
    for first in range(0, width, COLUMNS):
        at = begin[:, None] + first + column
        value = wide(tl.load(x + at, mask=(first + column < width) & (at < n), other=0.0))
        sums += value * value
    tl.store(energies + block, tl.sum(sums, 1).to(energies.dtype.element_ty), mask=begin < n)


@triton.jit(do_not_specialize=["k"])
def _pick(x, out, width, k, BITS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    valid = column < width
    bits = tl.where(valid, magnitudes(tl.load(x + row * width + column, mask=valid, other=0.0)), -1)
    bar = tl.sum(bits * 0, 0)
    for i in range(BITS):
        trial = bar | (tl.full([], 1, bits.dtype) << (BITS - 1 - i))
        bar = tl.where(tl.sum((bits >= trial).to(tl.int32), 0) >= k, trial, bar)
    above, tied = (bits > bar).to(tl.int32), (bits == bar).to(tl.int32)
    tied = tied * (tl.cumsum(tied, 0) <= k - tl.sum(above, 0)).to(tl.int32)
    chosen = above + tied
    tl.store(out + row * k + tl.cumsum(chosen, 0) - 1, (row * width + column).to(tl.int32), mask=chosen > 0)

"""Blocks of adjacent elements."""

import math
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.kernels.blocks import reference
from thinwire.kernels.groups import Groups
from thinwire.kernels.memory import constant
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
    size = groups.size or TILE
    if size > TILE:
        return reference.group_norms(x, groups, order)
    pieces = Groups(groups.runs, size)
    norms = _norms(x, pieces, size, order)
    return norms if groups.size or max(pieces.counts) < 2 else group_norms(norms, Groups(pieces.counts), order)


def scales_of(norms: Tensor, widths: Tensor | None, zero: float) -> Tensor:
    scales = torch.empty_like(norms, dtype=torch.float32)
    launch(_scales, tiles_of(norms.numel(), TILE), scales, norms, widths, norms.numel(), ZERO=zero, TILE=TILE)
    return scales


def _norms(x: Tensor, groups: Groups, size: int, order: float) -> Tensor:
    columns = triton.next_power_of_2(size)
    tiles = tiles_of_each(groups.counts, x.device, TILE // columns)
    norms = torch.empty(sum(groups.counts), dtype=torch.float64, device=x.device)
    begins, firsts = (list(accumulate(lengths, initial=0))[:-1] for lengths in (groups.runs, groups.counts))
    table = (constant(tuple(each), torch.int64, x.device) for each in (begins, groups.runs, firsts, groups.widths))
    how = {"ORDER": 0 if order == math.inf else int(order), "ROWS": TILE // columns, "COLUMNS": columns}
    launch(_group_norms, len(tiles), norms, x, *table, tiles, **how, num_warps=8)
    return norms


@triton.jit
def _group_norms(
    norms, x, begin, size, first, width, tiles, ORDER: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """ORDER 0 is the largest magnitude. As an integer it is NaN's where there is one."""
    run = tl.load(tiles + 3 * tl.program_id(0))
    group = tl.load(tiles + 3 * tl.program_id(0) + 1).to(tl.int64) + tl.arange(0, ROWS)
    columns, n = tl.load(width + run), tl.load(size + run)
    column = tl.arange(0, COLUMNS)[None, :]
    at = group[:, None] * columns + column
    value = tl.load(x + tl.load(begin + run) + at, mask=(column < columns) & (at < n), other=0.0)
    if ORDER == 0:
        norm = tl.max(magnitudes(value), 1).to(x.dtype.element_ty, bitcast=True).to(tl.float64)
    elif ORDER == 1:
        norm = tl.sum(tl.abs(value.to(tl.float64)), 1)
    else:
        norm = tl.sqrt(tl.sum(value.to(tl.float64) * value.to(tl.float64), 1))
    tl.store(norms + tl.load(first + run) + group, norm, mask=group * columns < n)


@triton.jit
def _scales(scales, norms, widths, n, ZERO: tl.constexpr, TILE: tl.constexpr):
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    norm = tl.load(norms + at, mask=at < n, other=0.0)
    if widths is not None:
        norm /= tl.load(widths + at, mask=at < n, other=1.0)
    finite = norm < 3.4028235677973366e38  # 2¹²⁸ − 2¹⁰³, which float32 rounds up to infinity
    scale = tl.where(finite, norm, float("nan")).to(tl.float32)
    tl.store(scales + at, tl.where(scale == 0, ZERO, scale), mask=at < n)


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

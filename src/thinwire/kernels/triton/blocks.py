"""Blocks of adjacent elements."""

import triton
import triton.language as tl
from torch import Tensor

from thinwire.kernels.triton.launch import TILE, launch, tiles_of, wide
from thinwire.kernels.triton.select import largest

_WIDEST = 1024


def block_energies(x: Tensor, width: int) -> Tensor:
    """See `reference.block_energies`."""
    energies = x.new_empty(tiles_of(x.numel(), width))
    columns = min(_WIDEST, triton.next_power_of_2(width))
    rows = TILE // columns
    launch(_energies, tiles_of(energies.numel(), rows), x, x.numel(), width, energies, ROWS=rows, COLUMNS=columns)
    return energies


def largest_blocks(x: Tensor, width: int, k: int) -> Tensor:
    """See `reference.largest_blocks`."""
    return largest(block_energies(x, width), k)


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

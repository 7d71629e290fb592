"""Picking large magnitudes in each row of a matrix."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.kernels import reference
from thinwire.kernels.triton.launch import launch, magnitudes

_WIDEST = 1 << 15


def largest_in_rows(x: Tensor, width: int, k: int) -> Tensor:
    """See `reference.largest_in_rows`, which takes rows too wide for one program's registers."""
    if width > _WIDEST:
        return reference.largest_in_rows(x, width, k)
    rows = x.numel() // width
    out = torch.empty(rows * k, dtype=torch.int32, device=x.device)
    warps = min(16, max(1, width // 256))
    sizes = {"BITS": 8 * x.element_size() - 1, "COLUMNS": triton.next_power_of_2(width), "num_warps": warps}
    launch(_pick, rows if k else 0, x, out, width, k, **sizes)
    return out


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

"""Sums of rows."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.kernels.triton import launch, tiles_of, wide

_BLOCK = 1024


def row_sums(rows: Tensor) -> Tensor:
    """See `reference.row_sums`."""
    out = torch.empty_like(rows[0])
    launch(_add, tiles_of(out.numel(), _BLOCK), out, rows, out.numel(), rows.shape[0], BLOCK=_BLOCK)
    return out


@triton.jit(do_not_specialize=["ranks"])
def _add(out, rows, n, ranks, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = wide(tl.load(rows + at, mask=at < n, other=0.0))
    for rank in range(1, ranks):
        total += wide(tl.load(rows + tl.cast(rank, tl.int64) * n + at, mask=at < n, other=0.0))
    tl.store(out + at, total.to(out.dtype.element_ty), mask=at < n)

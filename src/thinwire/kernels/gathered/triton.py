"""Elements of several vectors at given places, and the largest magnitude of each: a launch for all of them."""

from collections.abc import Sequence
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.kernels.gathered import reference
from thinwire.kernels.segments.triton import addresses, pointer, table, tiles_of_each
from thinwire.kernels.triton import launch

_BLOCK = 1024


def gather_each(xs: Sequence[Tensor], indices: Tensor, runs: Sequence[int]) -> Tensor:
    values = xs[0].new_empty(indices.numel())
    columns = table(values.device, addresses(xs), runs, list(accumulate(runs, initial=0))[:-1])
    tiles = tiles_of_each(tuple(runs), values.device, _BLOCK)
    launch(_gather_each, tiles.total, values, indices, *columns, *tiles, BLOCK=_BLOCK)
    return values


def peak_of_each(xs: Sequence[Tensor]) -> Tensor:
    """See `reference.peak_of_each`. Torch has it in one launch, but for vectors without elements."""
    if not all(x.numel() for x in xs):
        return reference.peak_of_each(xs)
    return torch.stack(torch._foreach_norm(list(xs), torch.inf))


@triton.jit(do_not_specialize=["count"])
def _gather_each(values, indices, address, size, start, tiles, count, BLOCK: tl.constexpr):
    vector = tl.load(tiles + tl.program_id(0))
    within = tl.load(tiles + count + tl.program_id(0)) + tl.arange(0, BLOCK)
    there, at = within < tl.load(size + vector), tl.load(start + vector) + within
    index = tl.load(indices + at, mask=there, other=0)
    tl.store(values + at, tl.load(pointer(address, vector, values) + index, mask=there), mask=there)

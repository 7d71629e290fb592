"""Adding, overwriting and clearing elements by index, and adding sorted tables."""

from collections.abc import Sequence

import torch
from torch import Tensor


def scatter_add(out: Tensor, indices: Tensor, values: Tensor, runs: Sequence[int], sign: float = 1.0) -> None:
    """Add sign · values to `out` at indices (int32), run after run; `runs` are their lengths.

    Within a run, only elements of value 0 may share an index. So the runs fix the order of summation, even on devices
    that add atomically.
    """
    values = values.to(out.dtype)
    for index, value in zip(indices.split(list(runs)), values.split(list(runs)), strict=True):
        out.index_add_(0, index, value, alpha=sign)


def scatter(
    out: Tensor, regions: Sequence[tuple[int, int]], indices: Tensor, values: Tensor, runs: Sequence[int]
) -> None:
    """Set the regions ((offset, length), …) of `out` to zero, then `scatter_add`. No index lies outside the regions."""
    for offset, length in regions:
        out[offset : offset + length].zero_()
    scatter_add(out, indices, values, runs)


def mask(x: Tensor, indices: Tensor, values: Tensor) -> None:
    """Set `x` to zero at indices (int32) whose value is not 0."""
    x.index_fill_(0, indices[values != 0].long(), 0)


def scatter_add_each(
    outs: Sequence[Tensor],
    offsets: Sequence[int],
    indices: Tensor,
    values: Tensor,
    runs: Sequence[int],
    sign: float = 1.0,
) -> None:
    """`scatter_add` to each of n ≥ 1 vectors, of a run each. Indices in run i count from −offsets[i] on."""
    parts = zip(outs, offsets, indices.split(list(runs)), values.split(list(runs)), strict=True)
    for out, offset, index, value in parts:
        scatter_add(out, index - offset, value, (value.numel(),), sign)


def mask_each(
    xs: Sequence[Tensor], offsets: Sequence[int], indices: Tensor, values: Tensor, runs: Sequence[int]
) -> None:
    """`mask` each of n ≥ 1 vectors, with a run each. Indices in run i count from −offsets[i] on."""
    for x, offset, index, value in zip(xs, offsets, indices.split(list(runs)), values.split(list(runs)), strict=True):
        mask(x, index - offset, value)


def merge(keys: Sequence[Tensor], rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the sum of tables, each with rows (n, width) at keys (int32, n): its keys, ascending, and its rows.

    Each key occurs once in the result. Rows of the same key are added in the order of the tables.
    """
    merged, places = torch.unique(torch.cat(list(keys)), return_inverse=True)
    out = rows[0].new_zeros(merged.numel(), rows[0].shape[1])
    for row, place in zip(rows, places.split([key.numel() for key in keys]), strict=True):
        out.index_add_(0, place, row)
    return merged.to(torch.int32), out

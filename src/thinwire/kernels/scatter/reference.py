"""Adding, overwriting and clearing elements by index, and adding sorted tables."""

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.kernels.parts import Ints, Regions, Vectors
from thinwire.kernels.places.reference import Checks


def scatter_add(
    outs: Vectors, offsets: Ints, indices: Tensor, values: Tensor, runs: Ints, sign: float = 1.0, masked: Vectors = ()
) -> None:
    """Add sign · values to vectors at indices (int32), run after run; `runs` are their lengths.

    The runs belong to one vector after another, and after the last to the first again; indices count from minus the
    vector's offset on. Within a run, only elements of value 0 may share an index. So the runs fix the order of
    summation, even on devices that add atomically. As many vectors `masked` are set to zero where a value is not 0.
    There may be these, those or both.
    """
    for i, (index, value) in enumerate(zip(indices.split(list(runs)), values.split(list(runs)), strict=True)):
        at = i % len(offsets)
        if outs:
            outs[at].index_add_(0, index - offsets[at], value.to(outs[at].dtype), alpha=sign)
        if masked:
            masked[at].index_fill_(0, (index[value != 0] - offsets[at]).long(), 0)


def scatter(
    out: Tensor, regions: Regions, indices: Tensor, values: Tensor, runs: Ints, ascending: bool = False,
    checks: Checks | None = None, flags: Tensor | None = None,
) -> None:  # fmt: skip
    """Set the regions ((offset, length), …) of `out` to zero, then `scatter_add`. No index lies outside the regions.

    With `ascending`, indices are known to ascend within each run, and from a payload's run to its next one where the
    regions do.

    With `checks`, values are (ranks, n), as they lie in the rows, which may have gaps; indices have their shape. The
    flags that the checks give are written, and if one is set, nothing is added.
    """
    if checks is not None and flags is not None:
        indices, values = indices.view(-1), values.reshape(-1).masked_fill(checks.failed(flags), 0)
    for offset, length in regions:
        out[offset : offset + length].zero_()
    scatter_add([out], [0], indices, values, runs)


def settle(
    out: Tensor, regions: Regions, indices: Tensor, values: Tensor, runs: Ints, ascending: bool,
    checks: Checks | None, flags: Tensor | None,
    outs: Vectors, offsets: Ints, own: Tensor, own_values: Tensor, own_runs: Ints, masked: Vectors,
) -> None:  # fmt: skip
    """Subtract this rank's own elements, as `scatter_add` does, and `scatter` the sum of all ranks' ones."""
    scatter_add(outs, offsets, own, own_values, own_runs, -1.0, masked)
    scatter(out, regions, indices, values, runs, ascending, checks, flags)


def merge(keys: Sequence[Tensor], rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the sum of tables, each with rows (n, width) at keys (int32, n): its keys, ascending, and its rows.

    Each key occurs once in the result. Rows of the same key are added in the order of the tables.
    """
    merged, places = torch.unique(torch.cat(list(keys)), return_inverse=True)
    out = rows[0].new_zeros(merged.numel(), rows[0].shape[1])
    for row, place in zip(rows, places.split([key.numel() for key in keys]), strict=True):
        out.index_add_(0, place, row)
    return merged.to(torch.int32), out

"""Adding, overwriting and clearing elements by index."""

from collections.abc import Sequence

from torch import Tensor


def scatter_add(out: Tensor, indices: Tensor, values: Tensor, runs: Sequence[int], sign: float = 1.0) -> None:
    """Add sign · values at indices (int32), run after run. Within a run no index occurs twice with a value but 0.

    The runs give a fixed order of summation, also on devices that add atomically.
    """
    values = values.to(out.dtype)
    for index, value in zip(indices.split(list(runs)), values.split(list(runs)), strict=True):
        out.index_add_(0, index, value, alpha=sign)


def scatter(
    out: Tensor, spans: Sequence[tuple[int, int]], indices: Tensor, values: Tensor, runs: Sequence[int]
) -> None:
    """Set the spans ((offset, length), …) of `out` to zero, then `scatter_add`. No index lies outside the spans."""
    for offset, length in spans:
        out[offset : offset + length].zero_()
    scatter_add(out, indices, values, runs)


def mask(x: Tensor, indices: Tensor, values: Tensor) -> None:
    """Set `x` to zero at indices (int32) whose value is not 0."""
    x.index_fill_(0, indices[values != 0].long(), 0)

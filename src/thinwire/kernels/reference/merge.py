"""Sums of sorted tables."""

from collections.abc import Sequence

import torch
from torch import Tensor


def merge(keys: Sequence[Tensor], rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the sum of tables, each of rows (n, width) at keys (int32): keys ascending, each once, added in order."""
    merged, places = torch.unique(torch.cat(list(keys)), return_inverse=True)
    out = rows[0].new_zeros(merged.numel(), rows[0].shape[1])
    for row, place in zip(rows, places.split([key.numel() for key in keys]), strict=True):
        out.index_add_(0, place, row)
    return merged.to(torch.int32), out

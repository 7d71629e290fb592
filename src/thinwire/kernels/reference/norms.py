"""Norms of groups."""

import torch
from torch import Tensor


def group_norms(x: Tensor, group: int, order: float) -> Tensor:
    """Return the norm of order 1, 2 or ∞ of each `group` elements of float32 `x`, float64 (⌈n / group⌉).

    NaN or infinite where an element is. Backends sum in another order: they differ by rounding (1e-12 of the norm).
    """
    full = x.numel() // group
    rows = (x[: full * group].view(full, group), x[None, full * group :])
    parts = [torch.linalg.vector_norm(part, order, dim=1, dtype=torch.float64) for part in rows if part.numel()]
    return torch.cat(parts) if parts else x.new_empty(0, dtype=torch.float64)

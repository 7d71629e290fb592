"""Thin factors of a matrix by a GPU's own libraries: alike on GPUs of one kind, as no kernel's sums are elsewhere."""

import torch
from torch import Tensor

from thinwire.kernels.reference.factors import row_sums

__all__ = ["orthonormal", "outer_sums", "row_sums"]


def outer_sums(out: Tensor, a: Tensor, b: Tensor) -> None:
    """See `reference.outer_sums`, added in any order."""
    torch.mm(a, b.T, out=out)


def orthonormal(x: Tensor) -> Tensor:
    """See `reference.orthonormal`, in the dtype of x."""
    return torch.linalg.qr(x).Q

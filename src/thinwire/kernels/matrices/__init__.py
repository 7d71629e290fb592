"""Sums of rows, products with thin factors and orthonormal columns, with the same bits on every processor.

For the last two, a GPU uses its own libraries. Their order of additions is the same on all GPUs of one kind.
"""

import torch
from torch import Tensor

from thinwire.kernels.dispatch import Kernel
from thinwire.kernels.matrices import cpu, reference

__all__ = ["orthonormal", "outer_sums", "row_sums"]


def _outer_sums(out: Tensor, a: Tensor, b: Tensor) -> None:
    torch.mm(a, b.T, out=out)


def _orthonormal(x: Tensor) -> Tensor:
    # Computed in the dtype of x.
    return torch.linalg.qr(x).Q


row_sums = Kernel(reference.row_sums, cpu.row_sums, reference.row_sums, by="rows")
outer_sums = Kernel(reference.outer_sums, cpu.outer_sums, _outer_sums, by="out a b")
orthonormal = Kernel(reference.orthonormal, cpu.orthonormal, _orthonormal, by="x")

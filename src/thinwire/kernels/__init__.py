"""Kernels by device: Numba for float32 and float64 on the CPU, plain torch for everything else. Same names in each.

The backends compute the same thing; which one runs changes the time only.
"""

from types import ModuleType

import torch
from torch import Tensor

from thinwire.kernels import cpu, reference


def backend(*tensors: Tensor) -> ModuleType:
    """Return the module whose kernels take these tensors."""
    dtype = tensors[0].dtype
    fast = dtype in (torch.float32, torch.float64) and all(
        t.device.type == "cpu" and t.dtype == dtype and t.is_contiguous() for t in tensors
    )
    return cpu if fast else reference


def integer_backend(*tensors: Tensor) -> ModuleType:
    """Return the module whose kernels on codes and bytes take these tensors."""
    return cpu if all(t.device.type == "cpu" and t.is_contiguous() for t in tensors) else reference

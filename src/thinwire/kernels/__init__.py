"""Kernels by device: Numba on the CPU, Triton on a GPU, plain torch for everything else. Same names in each.

The backends compute the same thing; which one runs changes the time only.
"""

import warnings
from functools import cache
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

from thinwire.kernels import cpu, reference
from thinwire.kernels.reference import Picks
from thinwire.kernels.reference.select import gather

__all__ = ["Picks", "backend", "gather", "integer_backend"]

_GPU_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def backend(*tensors: Tensor) -> ModuleType:
    """Return the module whose kernels take these tensors."""
    if _on("cuda", tensors) and all(t.dtype in _GPU_DTYPES for t in tensors):
        return _gpu()
    return (
        cpu if _on("cpu", tensors) and {t.dtype for t in tensors} in ({torch.float32}, {torch.float64}) else reference
    )


def integer_backend(*tensors: Tensor) -> ModuleType:
    """Return the module whose kernels on codes and bytes take these tensors."""
    return _gpu() if _on("cuda", tensors) else cpu if _on("cpu", tensors) else reference


def _on(device: str, tensors: tuple[Tensor, ...]) -> bool:
    return all(t.device.type == device and t.is_contiguous() for t in tensors)


@cache
def _gpu() -> ModuleType:
    # Imported when the first tensor on a GPU comes: elsewhere triton need not be there, nor its import be waited for.
    try:
        return import_module("thinwire.kernels.triton")
    except ImportError as error:
        warnings.warn(f"kernels on the GPU are plain torch, and slower: {error}", stacklevel=3)
        return reference

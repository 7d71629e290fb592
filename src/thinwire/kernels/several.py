"""Several tensors in one call of a loop: Numba is given their addresses, and sees each as an array.

A call costs some 10 microseconds before it does anything, and what surrounds it in Python as much. For the small
tensors of a bucket, that is more than the loop takes.
"""

from collections.abc import Sequence
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from torch import Tensor

from thinwire.kernels.compiled import compiled, intrinsic
from thinwire.kernels.parts import begins

Array = np.ndarray[Any, Any]


def addresses(*columns: Sequence[Tensor]) -> Array:
    """Return where the tensors' elements begin: int64, a row for each vector. Keep the tensors until the loop ends."""
    return np.stack([begins(column) for column in columns], axis=1)


@intrinsic
def _pointer(typing, address):
    """Return an address as a pointer."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), generate


@compiled
def vector(address, size, like):
    """Return the `size` elements at an address as an array of the dtype of `like`."""
    return numba.carray(_pointer(address), size, like.dtype)  # type: ignore[attr-defined]  # without types

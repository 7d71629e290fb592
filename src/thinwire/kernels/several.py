"""Several tensors in one call of a loop: Numba is given their addresses, see `parts`, and sees each as an array.

A call costs some 10 microseconds before it does anything, and what surrounds it in Python as much. For the small
tensors of a bucket, that is more than the loop takes.
"""

from typing import Any

import numba
from llvmlite import ir
from numba import types

from thinwire.kernels.compiled import compiled, intrinsic


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

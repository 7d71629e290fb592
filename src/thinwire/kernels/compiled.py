"""How Numba compiles the loops: on first use, without the GIL, and cached on disk.

Loops compile for several types of arrays, so they carry no annotations. Several tensors go into one call: Numba is
given their addresses, see `parts`, and sees each as an array. A call costs some 10 microseconds before it does
anything, and what surrounds it in Python as much. For the small tensors of a bucket, that is more than the loop takes.
"""

from collections.abc import Callable
from typing import Any

import numba.extending
from llvmlite import ir
from numba import njit, types

compiled: Callable[..., Any] = njit(nogil=True, cache=True, fastmath={"contract"}, error_model="numpy")
reordering: Callable[..., Any] = njit(nogil=True, cache=True, fastmath={"contract", "reassoc"}, error_model="numpy")
"""Sums may be reordered, so that they vectorise."""
exactly: Callable[..., Any] = njit(nogil=True, cache=True, error_model="numpy")
"""Every product and sum is rounded on its own, so any processor gives the bits of the reference."""
intrinsic: Callable[..., Any] = numba.extending.intrinsic
"""Instructions for LLVM, where Numba's loops cannot express them."""
overload: Callable[..., Any] = numba.extending.overload
"""Loops that Numba chooses among by the types of arguments: what is None then is known when they are compiled."""


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


def element(column: Any, i: Any) -> Any:
    """Return the i-th of an array, or None if there is no array."""
    return None if column is None else column[i]


@overload(element)
def _element(column, i):
    return (lambda column, i: None) if isinstance(column, types.NoneType) else (lambda column, i: column[i])

"""How Numba compiles the loops: on first use, without the GIL, and cached on disk.

Loops compile for several types of arrays, so they carry no annotations.
"""

from collections.abc import Callable
from typing import Any

import numba.extending
from numba import njit

compiled: Callable[..., Any] = njit(nogil=True, cache=True, fastmath={"contract"}, error_model="numpy")
reordering: Callable[..., Any] = njit(nogil=True, cache=True, fastmath={"contract", "reassoc"}, error_model="numpy")
"""Sums may be reordered, so that they vectorise."""
exactly: Callable[..., Any] = njit(nogil=True, cache=True, error_model="numpy")
"""Every product and sum is rounded on its own, so any processor gives the bits of the reference."""
intrinsic: Callable[..., Any] = numba.extending.intrinsic
"""Instructions for LLVM, where Numba's loops cannot express them."""
overload: Callable[..., Any] = numba.extending.overload
"""Loops that Numba chooses among by the types of arguments: what is None then is known when they are compiled."""

"""How the loops are compiled: on first use, without the GIL, and kept on disk."""

from collections.abc import Callable
from typing import Any

from numba import njit

# The compiled functions take arrays of several types, so they carry no annotations.
compiled: Callable[..., Any] = njit(nogil=True, cache=True, fastmath={"contract"}, error_model="numpy")
reordering: Callable[..., Any] = njit(nogil=True, cache=True, fastmath={"contract", "reassoc"}, error_model="numpy")
"""Sums may be taken in another order, so that they vectorise."""

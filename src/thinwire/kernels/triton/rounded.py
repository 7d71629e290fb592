"""Residuals of 16 bits: sums rounded by lot, so that small gradients are not lost beside a large residual."""

from typing import Any

from torch import Tensor

from thinwire.kernels.reference import Picks
from thinwire.kernels.triton.accumulate import accumulate_as
from thinwire.kernels.triton.hashing import signed_keys
from thinwire.kernels.triton.launch import TILE, factor, launch, tiles_of
from thinwire.kernels.triton.select import select_as


def accumulate_rounded(out: Tensor, residual: Tensor, gradient: Tensor, scale: float, seed: int) -> None:
    """See `reference.accumulate_rounded`."""
    rest = _arguments(out, residual, gradient, scale, seed)
    launch(accumulate_as, tiles_of(out.numel()), out, *rest, out.numel(), HOW="rounded", TILE=TILE, num_warps=8)


def accumulate_rounded_select(
    out: Tensor, residual: Tensor, gradient: Tensor, scale: float, seed: int, threshold: Tensor, capacity: int
) -> Picks:
    """See `reference.accumulate_rounded_select`, and `select`."""
    return select_as("rounded", out, _arguments(out, residual, gradient, scale, seed), threshold, capacity)


def _arguments(out: Tensor, residual: Tensor, gradient: Tensor, scale: float, seed: int) -> tuple[Any, ...]:
    return None, residual, None, gradient, factor(out, scale), None, *signed_keys(seed)

"""Residuals of 16 bits."""

import numpy as np
import torch
from torch import Tensor

from thinwire.kernels.cpu.ranges import map_ranges
from thinwire.kernels.cpu.select import select
from thinwire.kernels.loops import rounded as loops
from thinwire.kernels.reference import Picks, keys


def accumulate_rounded(out: Tensor, residual: Tensor, gradient: Tensor, scale: float, seed: int) -> None:
    """See `reference.accumulate_rounded`."""
    arrays = [t.view(torch.uint16).numpy() for t in (out, residual)]
    addend = gradient.to(torch.float32).numpy()
    high, low = keys(seed)

    def run(lo: int, hi: int) -> None:
        first = np.uint32((high + lo) & 0xFFFFFFFF)  # a draw adds its number to the key
        part = (array[lo:hi] for array in (*arrays, addend))
        loops.accumulate_rounded(*part, np.float32(scale), first, np.uint32(low))

    map_ranges(run, out.numel())


def accumulate_rounded_select(
    out: Tensor, residual: Tensor, gradient: Tensor, scale: float, seed: int, threshold: Tensor, capacity: int
) -> Picks:
    """See `reference.accumulate_rounded_select`."""
    accumulate_rounded(out, residual, gradient, scale, seed)
    return select(out, threshold, capacity)

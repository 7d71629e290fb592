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
    words = [np.uint64(key) for key in keys(seed)]
    map_ranges(lambda lo, hi: loops.accumulate_rounded(*arrays, addend, np.float32(scale), *words, lo, hi), out.numel())


def accumulate_rounded_select(
    out: Tensor, residual: Tensor, gradient: Tensor, scale: float, seed: int, threshold: Tensor, capacity: int
) -> Picks:
    """See `reference.accumulate_rounded_select`."""
    accumulate_rounded(out, residual, gradient, scale, seed)
    return select(out, threshold, capacity)

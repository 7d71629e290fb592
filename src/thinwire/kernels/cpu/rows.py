"""Picking large magnitudes in each row of a matrix."""

import torch
from torch import Tensor

from thinwire.kernels.cpu.ranges import map_ranges
from thinwire.kernels.cpu.strongest import as_integers
from thinwire.kernels.loops import rows as loops
from thinwire.kernels.memory import empty


def largest_in_rows(x: Tensor, width: int, k: int) -> Tensor:
    """See `reference.largest_in_rows`."""
    bits, sign = as_integers(x)
    out = empty(x.numel() // width * k, torch.int32, x.device)
    places = out.numpy()

    def run(lo: int, hi: int) -> None:
        loops.largest_in_rows(bits, sign, width, k, lo, hi, places[lo // width * k : hi // width * k])

    map_ranges(run, x.numel(), align=width)
    return out

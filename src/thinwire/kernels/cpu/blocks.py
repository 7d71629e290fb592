"""Blocks of adjacent elements."""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from thinwire.kernels.cpu.ranges import map_ranges
from thinwire.kernels.cpu.select import FEW, largest, sampled
from thinwire.kernels.cpu.strongest import Array, as_integers, strongest
from thinwire.kernels.loops import blocks as loops

_CHUNK = 256


def block_energies(x: Tensor, width: int) -> Tensor:
    """See `reference.block_energies`; sums are taken in another order."""
    energies = x.new_empty(-(-x.numel() // width))
    source, out = x.numpy(), energies.numpy()
    map_ranges(lambda lo, hi: loops.block_energies(source, width, lo, hi, out[lo:hi]), energies.numel())
    return energies


def largest_blocks(x: Tensor, width: int, k: int) -> Tensor:
    """See `reference.largest_blocks`; energies are looked at once, and only the few that may be wanted are kept."""
    blocks = -(-x.numel() // width)
    if k and blocks > FEW:
        whole = x[: x.numel() // width * width].view(-1, width)
        threshold, capacity = sampled(lambda stride: whole[::stride].square().sum(dim=1), k, blocks)
        keys, energies = _reaching(x, width, threshold, capacity)
        if k <= sum(map(len, keys)) <= capacity < blocks:
            return strongest(keys, energies, k)
    return largest(block_energies(x, width), k)


def _reaching(x: Tensor, width: int, threshold: Tensor, capacity: int) -> tuple[Sequence[Array], Sequence[Array]]:
    """Return the blocks that reach the threshold, or more than `capacity` of them, and their energies' bits."""
    source, (bar, sign) = x.numpy(), as_integers(threshold)

    def run(lo: int, hi: int) -> tuple[Array, Array]:
        room = min(capacity, hi - lo) + _CHUNK
        indices, found, scratch = np.empty(room, np.int32), np.empty(room, bar.dtype), x.new_empty(_CHUNK)
        bits, _ = as_integers(scratch)
        arguments = (source, width, sign, bar[()], lo, hi, indices, found, scratch.numpy(), bits)
        count = loops.select_blocks(*arguments)
        return indices[:count], found[:count]

    keys, energies = zip(*map_ranges(run, -(-x.numel() // width)), strict=True)
    return keys, energies

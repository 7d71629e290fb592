"""How Triton kernels are launched, and what they share.

Only files of this name import Triton. The kernels take several types, so they carry no annotations; compile-time
constants, such as the size of a tile, are in capitals.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

TILE = 4096
"""Elements that a program takes at a time: fewer than 2¹⁶, because two counts of them share one int32."""
PROGRAMS = 1024
"""How many programs share the tiles if each takes several: enough to keep a large GPU busy."""


def launch(kernel: Any, programs: int, *args: Any, **constants: Any) -> None:
    """Run `programs` programs of a kernel on the device of its first argument, a tensor; if 0, do nothing.

    Each product and sum is rounded on its own. Otherwise kernels that share a formula would differ in its last bits.
    A kernel writes only to tensors that it is given, so there is nothing to do on fake ones, which have a shape alone.
    """
    if not programs or isinstance(args[0], FakeTensor):
        return
    if not args[0].is_cuda:  # the interpreter
        kernel[(programs,)](*args, **constants)
        return
    if args[0].get_device() == torch.cuda.current_device():  # entering a device takes as long as some launches
        kernel[(programs,)](*args, enable_fp_fusion=False, **constants)
        return
    with torch.cuda.device(args[0].device):
        kernel[(programs,)](*args, enable_fp_fusion=False, **constants)


def tiles_of(numel: int, tile: int = TILE) -> int:
    """Return how many tiles cover `numel` elements."""
    return -(-numel // tile)


def factor(like: Tensor, value: float) -> Tensor:
    """Return a 0-dim tensor on the device. A plain argument would lose half the bits of a float64."""
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    return torch.full((), value, dtype=dtype, device=like.device)


@triton.jit
def wide(x):
    """Return 16-bit floats as float32, because they are added in that, and other floats as they are."""
    if x.dtype.primitive_bitwidth < 32:
        x = x.to(tl.float32)
    return x


@triton.jit
def magnitudes(x):
    """Return magnitudes as integers of the same order, NaN above infinity: int64 of float64, else int32."""
    if x.dtype.primitive_bitwidth == 64:
        bits = x.to(tl.int64, bitcast=True) & 0x7FFFFFFFFFFFFFFF
    elif x.dtype.primitive_bitwidth == 32:
        bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    else:
        bits = x.to(tl.int16, bitcast=True).to(tl.int32) & 0x7FFF
    return bits


@triton.jit
def tile_of(x, tile, n, TILE: tl.constexpr):
    """Return a tile's magnitudes, their indices, and which of them exist."""
    start = tl.cast(tile, tl.int64) * TILE  # in the interpreter a loop's tile is a plain number
    at = tl.arange(0, TILE)
    valid = at < n - start
    bits = magnitudes(tl.load(x + start + at, mask=valid))
    return bits, (start + at).to(tl.int32), valid

"""How Triton kernels are launched, and what they share.

Several vectors go into one launch: a table on the device says where each lies, and each program takes a tile of one. A
launch costs as much time as reading some megabytes, so for a bucket's small tensors it is launches that count.

Only files of this name import Triton. The kernels take several types, so they carry no annotations; compile-time
constants, such as the size of a tile, are in capitals.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from thinwire.kernels.memory import kept, sent, sent_anew
from thinwire.kernels.parts import begins

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


def addresses(xs: Sequence[Tensor]) -> "NDArray[Any]":
    """Return where the tensors' elements begin. Fake ones, which do not come together with others, lie nowhere."""
    return np.zeros(len(xs), np.int64) if isinstance(xs[0], FakeTensor) else begins(xs)


def table(device: torch.device, *columns: "Sequence[int] | NDArray[Any]") -> Tensor:
    """Return columns of numbers, int64, on a device: (columns, rows). The host does not wait.

    Rows are filled up to an even number, so that every column begins at a multiple of 16 bytes.
    """
    return table_of(device, lambda: columns)


def table_of(device: torch.device, columns: "Callable[[], Sequence[Sequence[int] | NDArray[Any]]]") -> Tensor:
    """Return the table of columns that may depend on numbers that change with the step."""

    def numbers() -> Tensor:
        made = columns()
        rows = len(made[0])
        found = np.zeros((len(made), rows + rows % 2), np.int64)
        found[:, :rows] = made
        return torch.frombuffer(found, dtype=torch.int64).view(found.shape)

    return sent_anew(numbers, device)


def factors(like: Tensor, numbers: Sequence[float]) -> "NDArray[Any]":
    """Return numbers as a column of a `table` for `factor_at`: as precise as sums that go to `like` are."""
    real, bits = (np.float64, np.int64) if like.dtype == torch.float64 else (np.float32, np.int32)
    return np.array(numbers, real).view(bits)


@kept
def tiles_of_each(lengths: tuple[int, ...], device: torch.device, tile: int | tuple[int, ...] = TILE) -> Tensor:
    """Return the tiles of vectors of these lengths, one vector's after another's: kept because layouts stay.

    int32 (tiles, 3): for each its vector, where it begins there, and the number of the vector's first tile. The tiles
    of each vector may have a size of their own.
    """
    each = np.broadcast_to(tile, len(lengths))
    tiles = -(-np.array(lengths, np.int64) // each)
    vector = np.repeat(np.arange(len(lengths)), tiles)
    first = np.repeat(np.cumsum([0, *tiles[:-1]]), tiles)
    of = np.stack([vector, (np.arange(len(vector)) - first) * each[vector], first], axis=1).astype(np.int32)
    room = bytearray(of.tobytes() + bytes(12))  # a row more, as nothing can be made of an empty buffer
    return sent(torch.frombuffer(room, dtype=torch.int32).view(-1, 3), device)[:-1]


@triton.jit
def pointer(addresses, vector, like):
    """Return where a vector begins, as a pointer to elements of the type of `like`."""
    return tl.load(addresses + vector).to(tl.pointer_type(like.dtype.element_ty))


@triton.jit
def factor_at(column, vector, like):
    """Return where a number of `factors` is."""
    real = tl.float64 if like.dtype.element_ty.primitive_bitwidth == 64 else tl.float32
    return (column + vector).to(tl.pointer_type(real), bitcast=True)


@triton.jit
def wide(x):
    """Return 16-bit floats as float32, because they are added in that, and other floats as they are."""
    if x.dtype.primitive_bitwidth < 32:
        x = x.to(tl.float32)
    return x


@triton.jit
def fitting(x, bound, like):
    """Return x as elements of `like`, the finite ones between ±bound, if there is one: see `Fit`."""
    fits = x.to(like.dtype.element_ty)
    if bound is not None:
        most, finite = tl.cast(bound, like.dtype.element_ty), tl.abs(wide(x)) < float("inf")
        fits = tl.where(finite & (x > most), most, tl.where(finite & (x < -most), -most, fits))
    return fits


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

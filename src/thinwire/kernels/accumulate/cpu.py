"""Fading, stochastic rounding and several small sums in one pass, in Numba; for one sum torch is as good as a loop."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinwire.kernels.compiled import compiled, exactly
from thinwire.kernels.hashing.cpu import draw
from thinwire.kernels.hashing.reference import keys
from thinwire.kernels.parts import addresses, in_dtype, sizes
from thinwire.kernels.ranges import map_groups, map_ranges
from thinwire.kernels.several import vector

_REALS: dict[torch.dtype, Any] = {torch.float32: np.float32, torch.float64: np.float64}


def accumulate_each(
    outs: Sequence[Tensor], residuals: Sequence[Tensor], gradients: Sequence[Tensor], scales: Sequence[float]
) -> None:
    """See `reference.accumulate_each`. A loop in Python over torch's sum would take longer than small sums do."""
    like, lengths = outs[0], sizes(outs)
    given, factors = in_dtype(gradients, like.dtype), np.array(scales, _REALS[like.dtype])
    places = addresses(outs, residuals, given)
    map_groups(
        lambda first, last: _each_loop(places[first:last], lengths[first:last], factors[first:last], like.numpy()),
        lengths,
    )


@compiled
def _each_loop(places, lengths, scales, like):
    for at in range(len(lengths)):
        out, residual = vector(places[at, 0], lengths[at], like), vector(places[at, 1], lengths[at], like)
        gradient, scale = vector(places[at, 2], lengths[at], like), scales[at]
        for i in range(out.size):
            out[i] = residual[i] + scale * gradient[i]


def accumulate_fading(out: Tensor, residual: Tensor, gradient: Tensor, scale: float, decay: float) -> None:
    """See `reference.accumulate_fading`."""
    real, arrays = _REALS[out.dtype], [t.numpy() for t in (out, residual, gradient.to(out.dtype))]

    def run(lo: int, hi: int) -> None:
        _fading_loop(*(array[lo:hi] for array in arrays), real(scale), real(decay))

    map_ranges(run, out.numel())


@compiled
def _fading_loop(out, residual, gradient, scale, decay):
    for i in range(out.size):
        out[i] = decay * residual[i] + scale * gradient[i]


def accumulate_rounded(
    out: Tensor, residual: Tensor, gradient: Tensor, scale: float, seed: int, decay: float = 1.0
) -> None:
    """See `reference.accumulate_rounded`."""
    arrays = [t.view(torch.uint16).numpy() for t in (out, residual)]
    addend = gradient.to(torch.float32).numpy()
    high, low = keys(seed)

    def run(lo: int, hi: int) -> None:
        first = np.uint32((high + lo) & 0xFFFFFFFF)  # a draw adds its index to the key
        part = (array[lo:hi] for array in (*arrays, addend))
        _rounded_loop(*part, np.float32(scale), np.float32(decay), first, np.uint32(low))

    map_ranges(run, out.numel())


def subtract_rounded(x: Tensor, indices: Tensor, values: Tensor, seed: int) -> None:
    """See `reference.subtract_rounded`."""
    high, low = (np.uint32(key) for key in keys(seed))
    _subtract_rounded_loop(x.view(torch.uint16).numpy(), indices.numpy(), values.to(torch.float32).numpy(), high, low)


@exactly
def _rounded_loop(out, residual, gradient, scale, decay, high, low):
    # Counts from 0, so that no index can be negative and the loop vectorises.
    for i in range(out.size):
        before = _wide(residual[i])
        out[i] = _rounded(np.float32(np.float32(decay * before) + np.float32(scale * gradient[i])), draw(i, high, low))


@exactly
def _subtract_rounded_loop(x, indices, values, high, low):
    for i in range(indices.size):
        if values[i] != 0:
            at = indices[i]
            x[at] = _rounded(np.float32(_wide(x[at]) - values[i]), draw(at, high, low))


@exactly
def _wide(bits):
    """The bfloat16 with these bits, as float32."""
    return np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)


@exactly
def _rounded(x, drawn):
    """The bits of float32 `x` as bfloat16, rounded by the random number."""
    bits = np.float32(x).view(np.uint32)
    rounded = np.uint32(np.uint32(bits + np.uint32(drawn & np.uint32(0xFFFF))) >> np.uint32(16))
    # Values that are not finite are truncated; a NaN whose upper half is that of an infinity stays NaN.
    quiet = np.uint32(0x40) if np.uint32(bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000) else np.uint32(0)
    cut = np.uint32(np.uint32(bits >> np.uint32(16)) | quiet)
    finite = np.uint32(bits & np.uint32(0x7F800000)) != np.uint32(0x7F800000)
    return np.uint16(rounded if finite else cut)

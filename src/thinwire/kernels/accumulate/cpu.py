"""Sums of several vectors, sums that fade, and stochastic rounding in Numba; else torch is as good as a loop."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinwire.kernels.accumulate import reference
from thinwire.kernels.compiled import compiled, element, exactly, vector
from thinwire.kernels.hashing.cpu import draw
from thinwire.kernels.hashing.reference import keys
from thinwire.kernels.parts import addresses, in_dtype, sizes
from thinwire.kernels.ranges import map_groups, map_ranges
from thinwire.kernels.sums import Sum


def accumulate(sums: Sum) -> None:
    if sums.seeds is not None:
        for i, seed in enumerate(sums.seeds):
            _round(sums, i, seed)
    elif sums.velocities is None and (sums.decays is not None or len(sums.scales) > 1):
        _add_each(sums)
    else:
        reference.accumulate(sums)


def _add_each(sums: Sum) -> None:
    if len(sums.scales) == 1:
        out, residual, gradient, scale, decay, *_ = arguments(sums)
        map_ranges(lambda lo, hi: _sum_loop(out[lo:hi], residual[lo:hi], gradient[lo:hi], scale, decay), out.size)
        return
    given, (scales, decays, *_), lengths = in_dtype(sums.gradients, sums.dtype), sums.factors, sizes(sums.outs)
    places, like = addresses(sums.outs, sums.residuals, given), sums.outs[0].numpy()
    map_groups(lambda first, last: _each_loop(places, lengths, scales, decays, like, first, last), lengths)


def arguments(sums: Sum) -> tuple[Any, ...]:
    """Return what loops on one sum take: None for what it has not."""
    vectors = sums.outs, sums.residuals, in_dtype(sums.gradients[:1], sums.dtype)
    scales, decays, *momentum = sums.factors
    moving = [None if xs is None else xs[0].numpy() for xs in (sums.moving, sums.velocities)]
    return *(xs[0].numpy() for xs in vectors), scales[0], element(decays, 0), *moving, *momentum


def _round(sums: Sum, i: int, seed: int) -> None:
    arrays = [x.view(torch.uint16).numpy() for x in (sums.outs[i], sums.residuals[i])]
    arrays.append(sums.gradients[i].to(torch.float32).numpy())
    scale, decay = np.float32(sums.scales[i]), np.float32(1.0 if sums.decays is None else sums.decays[i])
    high, low = keys(seed)

    def run(lo: int, hi: int) -> None:
        first = np.uint32((high + lo) & 0xFFFFFFFF)  # a draw adds its index to the key
        _rounded_loop(*[array[lo:hi] for array in arrays], scale, decay, first, np.uint32(low))

    map_ranges(run, len(arrays[0]))


@compiled
def _sum_loop(out, residual, gradient, scale, decay):
    for i in range(out.size):
        out[i] = sum_at(residual, gradient, i, scale, decay, None, None, None)


@compiled
def sum_at(residual, gradient, i, scale, decay, velocity, m, ahead):
    """Return the i-th sum. What is None is compiled away."""
    if m is not None:
        moving = m * velocity[i] + scale * gradient[i]
        if ahead is not None:
            return (residual[i] + scale * gradient[i]) + ahead * moving
        return residual[i] + moving
    if decay is not None:
        return decay * residual[i] + scale * gradient[i]
    return residual[i] + scale * gradient[i]


@compiled
def _each_loop(places, lengths, scales, decays, like, first, last):
    for at in range(first, last):
        size, out = lengths[at], vector(places[at, 0], lengths[at], like)
        residual, gradient = vector(places[at, 1], size, like), vector(places[at, 2], size, like)
        _sum_loop(out, residual, gradient, scales[at], element(decays, at))


def subtract_rounded(x: Tensor, indices: Tensor, values: Tensor, seed: int) -> None:
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

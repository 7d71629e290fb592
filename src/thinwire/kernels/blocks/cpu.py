"""Blocks of adjacent elements: a group of codes, a row of activations, or a Fourier coefficient's two parts."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from thinwire.kernels.blocks.reference import clipped
from thinwire.kernels.compiled import compiled, exactly, reordering
from thinwire.kernels.memory import empty
from thinwire.kernels.parts import Array, Groups
from thinwire.kernels.ranges import map_groups, map_ranges
from thinwire.kernels.select import loops
from thinwire.kernels.select.cpu import FEW, as_integers, largest, largest_of_pieces, sampled

_BLOCKS, _GROUP = 256, 1 << 14
"""How many energies are computed at a time, and how many elements of a long group are summed at a time."""


def block_energies(x: Tensor, width: int) -> Tensor:
    """See `reference.block_energies`; sums are taken in another order."""
    energies = x.new_empty(-(-x.numel() // width))
    source, out = x.numpy(), energies.numpy()
    map_ranges(lambda lo, hi: _energies_loop(source, width, lo, hi, out[lo:hi]), energies.numel())
    return energies


def largest_blocks(x: Tensor, width: int, k: int) -> Tensor:
    """See `reference.largest_blocks`; one pass computes the energies, and keeps only the few that may be wanted."""
    blocks = -(-x.numel() // width)
    if k and blocks > FEW:
        whole = x[: x.numel() // width * width].view(-1, width)
        threshold, capacity = sampled(lambda stride: whole[::stride].square().sum(dim=1), k, blocks)
        keys, energies = _reaching(x, width, threshold, capacity)
        if k <= sum(map(len, keys)) <= capacity < blocks:
            return largest_of_pieces(keys, energies, k)
    return largest(block_energies(x, width), k)


def _reaching(x: Tensor, width: int, threshold: Tensor, capacity: int) -> tuple[Sequence[Array], Sequence[Array]]:
    """Return the blocks that reach the threshold, or more than `capacity` of them, and their energies' bits."""
    source, (bar, sign) = x.numpy(), as_integers(threshold)

    def run(lo: int, hi: int) -> tuple[Array, Array]:
        room = min(capacity, hi - lo) + _BLOCKS
        indices, found, scratch = np.empty(room, np.int32), np.empty(room, bar.dtype), x.new_empty(_BLOCKS)
        bits, _ = as_integers(scratch)
        arguments = (source, width, sign, bar[()], lo, hi, indices, found, scratch.numpy(), bits)
        count = _select_blocks_loop(*arguments)
        return indices[:count], found[:count]

    keys, energies = zip(*map_ranges(run, -(-x.numel() // width)), strict=True)
    return keys, energies


def largest_in_rows(x: Tensor, width: int, k: int) -> Tensor:
    bits, sign = as_integers(x)
    out = empty(x.numel() // width * k, torch.int32, x.device)
    places = out.numpy()

    def run(lo: int, hi: int) -> None:
        _largest_in_rows_loop(bits, sign, width, k, lo, hi, places[lo // width * k : hi // width * k])

    map_ranges(run, x.numel(), align=width)
    return out


def group_norms(x: Tensor, groups: Groups, order: float) -> Tensor:
    """See `reference.group_norms`; long groups are cut into pieces, the same for any number of threads."""
    long = any(width > _GROUP < run for width, run in zip(groups.widths, groups.runs, strict=True))
    parts = (_of_groups(part, width, order) for part, width in groups.parts(x))
    found = np.concatenate(list(parts)) if long else _norms(x, groups, order)
    return torch.from_numpy(np.sqrt(found) if order == 2 else found)


def group_scales(
    x: Tensor, groups: Groups, order: float, widths: Tensor | None, zero: float, clip: float | None = None
) -> Tensor:
    """See `reference.group_scales`. On busy cores torch's threads wake later than NumPy is done with so few."""
    norms = group_norms(x, groups, order).numpy()
    with np.errstate(over="ignore", invalid="ignore"):
        scales = (norms if widths is None or clip else norms / widths.numpy()).astype(np.float32)
    scales[~np.isfinite(scales)] = np.nan
    scales[scales == 0] = zero
    return clipped(torch.from_numpy(scales), lambda: group_norms(x, groups, 2.0), widths, clip)


def _of_groups(x: Tensor, group: int, order: float) -> Array:
    if not group > _GROUP < x.numel():
        return _norms(x, Groups((x.numel(),), group), order)
    parts = [_norms(part, Groups((part.numel(),), _GROUP), order) for part in x.split(group)]
    return np.array([part.max() if order == math.inf else part.sum() for part in parts])


def _norms(x: Tensor, groups: Groups, order: float) -> Array:
    """Return the largest magnitude, or the sum of magnitudes or squares, of each group, float64."""
    pieces, given, found = groups.pieces(), x.numpy(), np.empty(sum(groups.counts), np.float64)
    map_groups(lambda first, last: _norms_loop(pieces[first:last], found, given, order), pieces[:, 5] - pieces[:, 4])
    return found


@reordering
def _energies_loop(x, width, lo, hi, out):
    # For blocks lo to hi. Pairs are Fourier coefficients.
    if width == 2 and 2 * hi <= x.size:
        for i in range(hi - lo):
            real, imaginary = x[2 * (lo + i)], x[2 * (lo + i) + 1]
            out[i] = real * real + imaginary * imaginary
    else:
        for i in range(hi - lo):
            total = x.dtype.type(0)
            for value in x[(lo + i) * width : min((lo + i + 1) * width, x.size)]:
                total += value * value
            out[i] = total


@compiled
def _select_blocks_loop(x, width, sign, threshold, lo, hi, indices, found, scratch, bits):
    # Energies are computed in `scratch`, and `bits` are its bits. `found` takes those that reach the threshold.
    count, capacity = 0, indices.size - scratch.size
    for start in range(lo, hi, scratch.size):
        several = min(scratch.size, hi - start)
        _energies_loop(x, width, start, start + several, scratch)
        for i in range(several if count <= capacity else 0):
            indices[count], found[count] = start + i, bits[i] & sign
            count += (bits[i] & sign) >= threshold
    return count


@compiled
def _largest_in_rows_loop(bits, sign, width, k, lo, hi, out):
    place = 0
    for start in range(lo, hi, width):
        row = bits[start : start + width]
        bar, ties = loops.bar_of(row, sign, k)
        for i in range(width):
            magnitude = row[i] & sign
            tied = magnitude == bar and ties > 0
            ties -= tied
            if tied or magnitude > bar:
                out[place] = start + i
                place += 1


@exactly
def part_of_group(group, g, lo, hi):
    """Return where the part of group `g` within elements lo to hi begins and ends."""
    return max(lo, g * group), min(hi, (g + 1) * group)


@reordering
def _sum(x, order):
    total = 0.0
    if order == 1:
        for i in range(x.size):
            total += np.float64(abs(x[i]))
    else:
        for i in range(x.size):
            total += np.float64(x[i]) * np.float64(x[i])
    return total


@exactly
def _largest(bits):
    largest = np.int32(0)
    for i in range(bits.size):
        largest = max(largest, bits[i] & np.int32(0x7FFFFFFF))
    return largest


@reordering
def _norms_loop(pieces, out, x, order):
    bits = x.view(np.int32)
    for at in range(len(pieces)):
        _, begin, first, group, lo, hi = pieces[at]
        for g in range(lo // group, -(-hi // group)):
            start, stop = part_of_group(group, g, lo, hi)
            if order == np.inf:
                out[first + g] = np.int32(_largest(bits[begin + start : begin + stop])).view(np.float32)
            else:
                out[first + g] = _sum(x[begin + start : begin + stop], order)

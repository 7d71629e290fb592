"""Adding, overwriting and clearing elements by index, in an order that no race between programs can change.

If runs ascend, the elements of one output tile are one stretch of each run, and a binary search finds it. A program
zeroes its tile and adds run after run while the tile is in the cache. The device itself checks whether the runs ascend.
If not, another kernel takes over: each of its programs owns a share of the output, goes through all runs, and adds the
elements that fall into its share.
"""

from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.kernels.memory import constant
from thinwire.kernels.parts import Ints, Regions, Vectors, cut_at
from thinwire.kernels.triton import addresses, launch, pointer, table, tiles_of, tiles_of_each, wide

_TILE = 16384
_CHUNK = 1024
_OWNERS = 256
_LEAST_SHARE = 4096
_FEW = 4
"""Up to this many runs are added by one launch each, whatever their elements."""


def scatter_add(outs: Vectors, offsets: Ints, indices: Tensor, values: Tensor, runs: Ints, sign: float = 1.0) -> None:
    """See `reference.scatter_add`; elements with value 0 are skipped, so padding needs no order."""
    values = values.to(outs[0].dtype)
    if len(outs) == 1 and len(runs) > _FEW:
        _add_owned(outs[0], _counted(indices, offsets[0]), values, runs, sign, None)
        return
    _each(_add, outs, offsets, indices, values, runs, sign)


def scatter(
    out: Tensor, regions: Regions, indices: Tensor, values: Tensor, runs: Ints, ascending: bool = False
) -> None:
    """See `reference.scatter`; if the runs of a payload ascend together, everything is written once."""
    values = values.to(out.dtype)
    starts, stops = (_on(edges, out.device) for edges in _tiles(tuple(regions)))
    tiles, stretches = starts.numel(), _stretches(tuple(runs), len(regions))
    count = len(stretches) - 1
    if 8 * count * tiles > out.nbytes:  # so many short runs that the table of bounds would outgrow the output
        stretches, count = (0,), 0
    edges, bounds = _on(stretches, out.device), starts.new_empty(2, count, tiles)
    disorder = None if ascending and count else starts.new_zeros(1)
    if count:
        if disorder is not None:
            checks = (indices, edges, indices.numel(), count, disorder)
            launch(_check, tiles_of(indices.numel(), _CHUNK), *checks, CHUNK=_CHUNK)
        steps = max(map(int.__sub__, stretches[1:], stretches)).bit_length()
        launch(
            _search, tiles_of(count * tiles, 128), indices, edges, starts, stops, bounds, count, tiles, steps, SIZE=128
        )
    elif indices.numel() and disorder is not None:
        disorder.fill_(1)
    args = (out, starts, stops, indices, values, bounds, disorder, count, tiles)
    launch(_write, tiles, *args, TILE=_TILE, CHUNK=_CHUNK // 4, num_warps=8)
    if indices.numel() and disorder is not None:
        _add_owned(out, indices, values, runs, 1.0, disorder)


def mask(xs: Vectors, offsets: Ints, indices: Tensor, values: Tensor, runs: Ints) -> None:
    if len(xs) == 1:
        _each(_mask, xs, offsets, indices, values, [indices.numel()])
    else:
        _each(_mask, xs, offsets, indices, values.to(xs[0].dtype), runs)


def _each(kernel: Any, xs: Vectors, offsets: Ints, indices: Tensor, values: Tensor, runs: Ints, *more: Any) -> None:
    """Launch a kernel on one turn after another: a run of each vector."""
    start = 0
    for first in range(0, len(runs), len(xs)):
        part = runs[first : first + len(xs)]
        end = start + sum(part)
        index, value, start = indices[start:end], values[start:end], end
        if len(xs) > 1:
            tiles = tiles_of_each(tuple(part), value.device, _CHUNK)
            *starts, _ = edges = list(accumulate(part, initial=0))
            places = table(value.device, addresses(xs), offsets, starts, edges[1:])
            launch(kernel, len(tiles), value, index, *places, tiles, *more, CHUNK=_CHUNK)
        else:
            args = (value, _counted(index, offsets[0]), xs[0], None, None, index.numel(), None, *more)
            launch(kernel, tiles_of(index.numel(), _CHUNK), *args, CHUNK=_CHUNK)


def _counted(indices: Tensor, offset: int) -> Tensor:
    return indices - offset if offset else indices


def _add_owned(out: Tensor, indices: Tensor, values: Tensor, runs: Ints, sign: float, disorder: Tensor | None) -> None:
    edges = _on(tuple(accumulate(runs, initial=0)), out.device)
    share = max(_LEAST_SHARE, tiles_of(out.numel(), _OWNERS))
    args = (out, indices, values, edges, disorder, out.numel(), share, len(runs), sign)
    launch(_add_share, tiles_of(out.numel(), share), *args, CHUNK=_CHUNK, num_warps=8)


def _stretches(runs: tuple[int, ...], regions: int) -> tuple[int, ...]:
    """Return the edges of stretches that should ascend: each payload's runs together, if it has one per region."""
    edges = tuple(accumulate(runs, initial=0))
    return tuple(sorted({*edges[:: regions if regions and len(runs) % regions == 0 else 1], edges[-1]}))


def _on(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    return constant(numbers, torch.int32, device)


@lru_cache(maxsize=256)
def _tiles(regions: tuple[tuple[int, int], ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return where the tiles of adjoining regions start and stop."""
    joined = cut_at(regions).joined.spans
    tiles = [(lo, min(lo + _TILE, stop)) for start, stop in joined for lo in range(start, stop, _TILE)]
    return tuple(lo for lo, _ in tiles), tuple(hi for _, hi in tiles)


@triton.jit
def _add_to(out, index, value, sign, there):
    # Adds at least in the output's precision; a sum of 16-bit floats is rounded once.
    there = there & (value != 0)
    place = out + index.to(tl.int64)
    total = wide(tl.load(place, mask=there, other=0.0)) + sign * wide(value)
    tl.store(place, total.to(value.dtype), mask=there)


@triton.jit(do_not_specialize=["count"])
def _check(indices, edges, n, count, disorder, CHUNK: tl.constexpr):
    """Add to `disorder` how often an index is below the one before it, except where a stretch begins."""
    at = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    inner = (at > 0) & (at < n)
    descends = tl.load(indices + at, mask=inner, other=0) < tl.load(indices + at - 1, mask=inner, other=0)
    inner = (at > 0) & (at < count)
    begin = tl.load(edges + at, mask=inner, other=1)
    allowed = tl.load(indices + begin, mask=inner, other=0) < tl.load(indices + begin - 1, mask=inner, other=0)
    found = tl.sum(descends.to(tl.int32), 0) - tl.sum(allowed.to(tl.int32), 0)
    if found != 0:
        tl.atomic_add(disorder, found, sem="relaxed")


@triton.jit
def _lower_bound(indices, lo, hi, target, steps):
    for _ in range(steps):
        middle = lo + (hi - lo) // 2
        below = (lo < hi) & (tl.load(indices + middle, mask=lo < hi, other=0) < target)
        hi = tl.where(below, hi, middle)
        lo = tl.where(below, middle + 1, lo)
    return lo


@triton.jit(do_not_specialize=["count", "tiles", "steps"])
def _search(indices, edges, starts, stops, bounds, count, tiles, steps, SIZE: tl.constexpr):
    """For each stretch and tile, write where the tile's elements begin and end in the stretch."""
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    there = at < count * tiles
    stretch, tile = at // tiles, at % tiles
    lo = tl.load(edges + stretch, mask=there, other=0)
    hi = tl.load(edges + stretch + 1, mask=there, other=0)
    begin = _lower_bound(indices, lo, hi, tl.load(starts + tile, mask=there, other=0), steps)
    end = _lower_bound(indices, begin, hi, tl.load(stops + tile, mask=there, other=0), steps)
    tl.store(bounds + at, begin, mask=there)
    tl.store(bounds + count * tiles + at, end, mask=there)


@triton.jit(do_not_specialize=["count", "tiles"])
def _write(
    out, starts, stops, indices, values, bounds, disorder, count, tiles, TILE: tl.constexpr, CHUNK: tl.constexpr
):
    tile = tl.program_id(0)
    start, stop = tl.load(starts + tile), tl.load(stops + tile)
    at = tl.arange(0, TILE)
    tl.store(out + start.to(tl.int64) + at, tl.zeros([TILE], out.dtype.element_ty), mask=at < stop - start)
    if _found(disorder, True):
        return
    for stretch in range(count):
        tl.debug_barrier()  # one after the other, and after the zeros
        begin = tl.load(bounds + stretch * tiles + tile)
        end = tl.load(bounds + (count + stretch) * tiles + tile)
        for first in range(begin, end, CHUNK):
            place = first + tl.arange(0, CHUNK)
            index = tl.load(indices + place, mask=place < end, other=0)
            _add_to(out, index, tl.load(values + place, mask=place < end, other=0.0), 1.0, place < end)


@triton.jit
def _found(disorder, FALLS: tl.constexpr):
    """Whether runs were looked at, and whether they ascend or, with FALLS, do not."""
    result = False
    if disorder is not None:
        result = (tl.load(disorder) != 0) == FALLS
    return result


@triton.jit(do_not_specialize=["count"])
def _add_share(out, indices, values, edges, disorder, n, share, count, sign, CHUNK: tl.constexpr):
    if _found(disorder, False):
        return
    lo = tl.program_id(0).to(tl.int64) * share
    hi = tl.minimum(lo + share, n)
    for run in range(count):
        end = tl.load(edges + run + 1)
        for first in range(tl.load(edges + run), end, CHUNK):
            at = first + tl.arange(0, CHUNK)
            index = tl.load(indices + at, mask=at < end, other=-1)
            mine = (index >= lo) & (index < hi)
            _add_to(out, index, tl.load(values + at, mask=mine, other=0.0), sign, mine)
        tl.debug_barrier()


@triton.jit
def _elements(values, indices, x, offset, begin, end, tiles, CHUNK: tl.constexpr):
    """Return where a program's elements go, which exist, and their values: of one vector, or of several by a table."""
    if tiles is None:
        place = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
        there = place < end
        index = tl.load(indices + place, mask=there, other=0)
    else:
        vector, within = tl.load(tiles + 3 * tl.program_id(0)), tl.load(tiles + 3 * tl.program_id(0) + 1)
        place = tl.load(begin + vector) + within + tl.arange(0, CHUNK)
        there = place < tl.load(end + vector)
        index = tl.load(indices + place, mask=there, other=0) - tl.load(offset + vector)
        x = pointer(x, vector, values)
    return x, index, there, tl.load(values + place, mask=there, other=0.0)


@triton.jit
def _add(values, indices, x, offset, begin, end, tiles, sign, CHUNK: tl.constexpr):
    out, index, there, value = _elements(values, indices, x, offset, begin, end, tiles, CHUNK)
    _add_to(out, index, value, sign, there)


@triton.jit
def _mask(values, indices, x, offset, begin, end, tiles, CHUNK: tl.constexpr):
    out, index, there, value = _elements(values, indices, x, offset, begin, end, tiles, CHUNK)
    tl.store(out + index.to(tl.int64), tl.zeros([CHUNK], out.dtype.element_ty), mask=there & (value != 0))

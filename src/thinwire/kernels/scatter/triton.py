"""Adding, overwriting and clearing elements by index, in an order that no race between programs can change.

If runs ascend, the elements of one output tile are one stretch of each run, and a binary search finds it. A program
zeroes its tile and adds run after run while the tile is in the cache. If not, each program owns several tiles, goes
through all runs, and adds the elements that fall into its tiles.
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
from thinwire.kernels.places.reference import Checks
from thinwire.kernels.places.triton import FIXED, failed
from thinwire.kernels.triton import addresses, launch, pointer, table, tiles_of, tiles_of_each, wide

_TILE = 16384
_CHUNK = 1024
_OWNERS = 256
_RUNS = 32
"""How many runs' stretches are looked for at a time."""
_FEW = 4
"""Up to this many runs are added by one launch each, whatever their elements."""
_NARROW = 2**31 - 1
"""Up to this many elements of all payloads are counted in 32 bits."""
Part = tuple[int, tuple[Any, ...]]
"""How many programs, and their arguments. Those that add are preceded by a tensor of the type that they add to."""
_NOTHING: Part = (0, (None,) * 9)
_UNCHECKED = (0, 1, *(None,) * 8)


def scatter_add(
    outs: Vectors, offsets: Ints, indices: Tensor, values: Tensor, runs: Ints, sign: float = 1.0, masked: Vectors = ()
) -> None:
    """See `reference.scatter_add`; elements with value 0 are skipped, so padding needs no order."""
    if len(outs) == 1 and len(runs) > _FEW:
        regions = ((0, outs[0].numel()),)
        found = indices - offsets[0] if offsets[0] else indices
        _launch(_owned(outs[0], regions, found, values, runs, sign), CLEAR=False)
        outs = ()
    if not outs and len(masked) == 1:
        runs = [indices.numel()]  # in any order
    if outs or masked:
        _each(outs, masked, offsets, indices, values, runs, sign)


def scatter(
    out: Tensor, regions: Regions, indices: Tensor, values: Tensor, runs: Ints, ascending: bool = False,
    checks: Checks | None = None, flags: Tensor | None = None,
) -> None:  # fmt: skip
    written = _written(out, regions, indices, values, runs, ascending)
    _launch(written, checked=_checked(values, runs, checks, flags), ASCENDING=ascending)


def settle(
    out: Tensor, regions: Regions, indices: Tensor, values: Tensor, runs: Ints, ascending: bool,
    checks: Checks | None, flags: Tensor | None,
    outs: Vectors, offsets: Ints, own: Tensor, own_values: Tensor, own_runs: Ints, masked: Vectors,
) -> None:  # fmt: skip
    """See `reference.settle`: one launch, as a rule."""
    if len(own_runs) > len(outs):
        scatter_add(outs, offsets, own, own_values, own_runs, -1.0, masked)
        scatter(out, regions, indices, values, runs, ascending, checks, flags)
        return
    added = _added(outs, masked, offsets, own, own_values, own_runs, -1.0)
    written = _written(out, regions, indices, values, runs, ascending)
    _launch(written, added, _checked(values, runs, checks, flags), ASCENDING=ascending)


def _launch(
    written: Part = _NOTHING, added: Part = _NOTHING, checked: tuple[Any, ...] = _UNCHECKED,
    *, ASCENDING: bool = False, CLEAR: bool = True,
) -> None:  # fmt: skip
    """Launch programs that write, and programs that add."""
    (many, args), (more, others) = written, added
    sizes = {"TILE": _TILE, "CHUNK": _CHUNK, "RUNS": _RUNS, "FIXED": FIXED, "num_warps": 8}
    like, others = (others[0], others[1:]) if more else (args[0], others)
    launch(_settle, many + more, like, many, *args, *others, *checked, ASCENDING=ASCENDING, CLEAR=CLEAR, **sizes)


def _checked(values: Tensor, runs: Ints, checks: Checks | None, flags: Tensor | None) -> tuple[Any, ...]:
    """Return the gap between rows of values, how many runs each has, and what is checked."""
    if checks is None:
        return _UNCHECKED
    (rows, fixed, wrong), (ranks, n) = checks, values.shape
    given = torch.cat(list(wrong)) if len(wrong) > 1 else next(iter(wrong), None)
    sizes = fixed.shape[1], flags, given, 0 if given is None else given.numel()
    return values.stride(0) - n, len(runs) // ranks, rows, fixed, ranks, rows.stride(0), *sizes


def _each(
    outs: Vectors, masked: Vectors, offsets: Ints, indices: Tensor, values: Tensor, runs: Ints, sign: float
) -> None:
    """Add, mask or both in one turn after another: a run of each vector. If not both, one has no vectors."""
    start, count = 0, len(outs or masked)
    for first in range(0, len(runs), count):
        part = runs[first : first + count]
        end = start + sum(part)
        _launch(added=_added(outs, masked, offsets, indices[start:end], values[start:end], part, sign))
        start = end


def _added(
    outs: Vectors, masked: Vectors, offsets: Ints, indices: Tensor, values: Tensor, runs: Ints, sign: float
) -> Part:
    """Return how many programs add a run to each vector, mask it or both, and their arguments."""
    like = (outs or masked)[0].new_empty(0)  # its type alone counts
    if len(runs) == 1:
        out, mask_ = ((xs or (None,))[0] for xs in (outs, masked))
        args = (like, values, indices, out, mask_, offsets[0], None, indices.numel(), None, sign)
        return tiles_of(indices.numel(), _CHUNK), args
    tiles = tiles_of_each(tuple(runs), values.device, _CHUNK)
    *starts, _ = edges = list(accumulate(runs, initial=0))
    columns = addresses(outs or masked), addresses(masked or outs), offsets, starts, edges[1:]
    out, mask_, *places = table(values.device, *columns)
    return len(tiles), (like, values, indices, out if outs else None, mask_ if masked else None, *places, tiles, sign)


def _written(out: Tensor, regions: Regions, indices: Tensor, values: Tensor, runs: Ints, ascending: bool) -> Part:
    """Return how many programs do what `reference.scatter` does, and their arguments.

    If the runs of a payload ascend together, each tile looks at its own elements alone.
    """
    if not ascending:
        return _owned(out, regions, indices, values, runs, 1.0)
    starts, stops = (_on(edges, out.device) for edges in _tiles(tuple(regions)))
    stretches = _stretches(tuple(runs), len(regions))
    steps = max(map(int.__sub__, stretches[1:], stretches), default=0).bit_length()
    args = (out, starts, stops, indices, values, _on(stretches, out.device), len(stretches) - 1, steps, 1.0)
    return starts.numel(), args


def _owned(out: Tensor, regions: Regions, indices: Tensor, values: Tensor, runs: Ints, sign: float) -> Part:
    starts, stops = (_on(edges, out.device) for edges in _tiles(tuple(regions)))
    edges, tiles = _on(tuple(accumulate(runs, initial=0)), out.device), starts.numel()
    return min(_OWNERS, tiles), (out, starts, stops, indices, values, edges, len(runs), tiles, sign)


def _stretches(runs: tuple[int, ...], regions: int) -> tuple[int, ...]:
    """Return the edges of stretches that should ascend: each payload's runs together, if it has one per region."""
    edges = tuple(accumulate(runs, initial=0))
    return tuple(sorted({*edges[:: regions if regions and len(runs) % regions == 0 else 1], edges[-1]}))


def _on(ascending: tuple[int, ...], device: torch.device) -> Tensor:
    wide_enough = torch.int64 if ascending and ascending[-1] > _NARROW else torch.int32
    return constant(ascending, wide_enough, device)


@lru_cache(maxsize=256)
def _tiles(regions: tuple[tuple[int, int], ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return where the tiles of adjoining regions start and stop."""
    joined = cut_at(regions).joined.spans
    tiles = [(lo, min(lo + _TILE, stop)) for start, stop in joined for lo in range(start, stop, _TILE)]
    return tuple(lo for lo, _ in tiles), tuple(hi for _, hi in tiles)


@triton.jit
def _add_to(out, index, value, sign, there):
    # Adds at least in the output's precision; a sum of 16-bit floats is rounded once.
    value = value.to(out.dtype.element_ty)
    there = there & (value != 0)
    place = out + index.to(tl.int64)
    total = wide(tl.load(place, mask=there, other=0.0)) + sign * wide(value)
    tl.store(place, total.to(out.dtype.element_ty), mask=there)


@triton.jit
def _lower_bound(indices, lo, hi, target, steps):
    for _ in range(steps):
        middle = lo + (hi - lo) // 2
        below = (lo < hi) & (tl.load(indices + middle, mask=lo < hi, other=0) < target)
        hi = tl.where(below, hi, middle)
        lo = tl.where(below, middle + 1, lo)
    return lo


@triton.jit
def _clear(out, start, stop, TILE: tl.constexpr):
    at = tl.arange(0, TILE)
    tl.store(out + start.to(tl.int64) + at, tl.zeros([TILE], out.dtype.element_ty), mask=at < stop - start)


@triton.jit(
    do_not_specialize=["many", "count", "extent", "offset", "gap", "per_row", "ranks", "stride", "fixed_count", "n"]
)
def _settle(
    like, many, out, starts, stops, indices, values, edges, count, extent, sign,
    own_values, own_indices, x, masked, offset, begin, end, tiles, own_sign,
    gap, per_row, rows, fixed, ranks, stride, fixed_count, flags, given, n,
    ASCENDING: tl.constexpr, CLEAR: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr, RUNS: tl.constexpr,
    FIXED: tl.constexpr,
):  # fmt: skip
    """The first programs write, and the others add. `extent`: steps of a search, or how many tiles there are."""
    program = tl.program_id(0) - many
    if out is not None:  # noqa: SIM102 - this is known when it is compiled
        if program < 0:
            if rows is not None:
                count = tl.where(
                    failed(flags, rows, fixed, ranks, stride, fixed_count, given, n, FIXED, CHUNK), 0, count
                )
            if ASCENDING:
                _write(out, starts, stops, indices, values, gap, edges, count, extent, TILE, CHUNK // 4, RUNS)
            else:
                _add_share(
                    out, starts, stops, indices, values, gap, per_row, edges, count, extent, sign, many,
                    CLEAR, TILE, CHUNK,
                )  # fmt: skip
    if own_values is not None:  # noqa: SIM102
        if program >= 0:
            _add(like, own_values, own_indices, x, masked, offset, begin, end, tiles, own_sign, program, CHUNK)


@triton.jit
def _write(
    out, starts, stops, indices, values, gap, edges, count, steps, TILE: tl.constexpr, CHUNK: tl.constexpr,
    RUNS: tl.constexpr,
):  # fmt: skip
    start, stop = tl.load(starts + tl.program_id(0)), tl.load(stops + tl.program_id(0))
    _clear(out, start, stop, TILE)
    for group in range(0, count, RUNS):
        each = tl.arange(0, RUNS)
        lo = tl.load(edges + group + each, mask=group + each < count, other=0)
        hi = tl.load(edges + group + each + 1, mask=group + each < count, other=0)
        begins = _lower_bound(indices, lo, hi, start, steps)
        ends = _lower_bound(indices, begins, hi, stop, steps)
        for run in range(tl.minimum(count - group, RUNS)):
            tl.debug_barrier()  # one after the other, and after the zeros
            begin, end = tl.sum(tl.where(each == run, begins, 0), 0), tl.sum(tl.where(each == run, ends, 0), 0)
            row = values + tl.cast(group + run, tl.int64) * gap
            for first in range(begin, end, CHUNK):
                place = first + tl.arange(0, CHUNK)
                index = tl.load(indices + place, mask=place < end, other=0)
                _add_to(out, index, tl.load(row + place, mask=place < end, other=0.0), 1.0, place < end)


@triton.jit
def _add_share(
    out, starts, stops, indices, values, gap, per_row, edges, count, tiles, sign, owners,
    CLEAR: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * tiles // owners
    last = (tl.program_id(0).to(tl.int64) + 1) * tiles // owners
    if CLEAR:
        for tile in range(first, last):
            _clear(out, tl.load(starts + tile), tl.load(stops + tile), TILE)
    lo, hi = tl.load(starts + first), tl.load(stops + last - 1)
    for run in range(count):
        tl.debug_barrier()
        row, end = values + tl.cast(run // per_row, tl.int64) * gap, tl.load(edges + run + 1)
        for chunk in range(tl.load(edges + run), end, CHUNK):
            at = chunk + tl.arange(0, CHUNK)
            index = tl.load(indices + at, mask=at < end, other=-1)
            mine = (index >= lo) & (index < hi)
            _add_to(out, index, tl.load(row + at, mask=mine, other=0.0), sign, mine)


@triton.jit
def _add(like, values, indices, x, masked, offset, begin, end, tiles, sign, program, CHUNK: tl.constexpr):
    """Add to x, and set `masked` to zero, where a value is not 0: of one vector, or of several by a table."""
    if tiles is None:
        place = program * CHUNK + tl.arange(0, CHUNK)
        there = place < end
        index = tl.load(indices + place, mask=there, other=0).to(tl.int64) - offset
    else:
        vector, within = tl.load(tiles + 3 * program), tl.load(tiles + 3 * program + 1)
        place = tl.load(begin + vector) + within + tl.arange(0, CHUNK)
        there = place < tl.load(end + vector)
        index = tl.load(indices + place, mask=there, other=0) - tl.load(offset + vector)
        x = x if x is None else pointer(x, vector, like)
        masked = masked if masked is None else pointer(masked, vector, like)
    value = tl.load(values + place, mask=there, other=0.0)
    if x is not None:
        _add_to(x, index, value, sign, there)
    if masked is not None:
        tl.store(masked + index, tl.zeros([CHUNK], masked.dtype.element_ty), mask=there & (value != 0))

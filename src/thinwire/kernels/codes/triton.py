"""Numbers as codes of a few bits, and back."""

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.kernels.accumulate.triton import joined
from thinwire.kernels.blocks.reference import Norm
from thinwire.kernels.blocks.triton import factored, group_scales, norm_at, of_pieces, pieces_of, scale_of
from thinwire.kernels.codes import reference
from thinwire.kernels.codes.reference import Arrived, How, OffsetGrid, Packed
from thinwire.kernels.hashing.triton import hash32, signed_keys, signed_keys_of
from thinwire.kernels.memory import constant
from thinwire.kernels.parts import Groups, Ints, Parts, cut_of_runs, whole
from thinwire.kernels.places.triton import FIXED, any_of, failed
from thinwire.kernels.replay import Changing
from thinwire.kernels.triton import TILE, launch, table_of, tiles_of, tiles_of_each, wide

_BLOCK = 1024
_CHECKS = 3
"""So many tensors of flags are read as they are; more are joined first."""
_NUMBERS = ["begin", "first", "group", "high", "low"]


def codes_encode(
    codes: Tensor, x: Tensor, scales: Tensor, groups: Groups, how: How, seeds: Ints, *decoded: Tensor
) -> None:
    kind = how if isinstance(how, str) else how.rounding if isinstance(how, OffsetGrid) else "uniform"
    grid, (table, out) = () if isinstance(how, str) else tuple(how), decoded or (None, None)
    last = 0 if table is None else table.numel() - 1
    _run(_encode, (codes, x, scales, table, out), groups, seeds, HOW=kind, GRID=grid, LAST=last)


def scaled_encode(
    codes: Tensor, xs: Parts, groups: Groups, norm: Norm, how: How, seeds: Ints, factor: float, *decoded: Tensor
) -> Tensor:
    """See `reference.scaled_encode`: in one launch, or in two if a run is one group of many elements.

    A group is scaled and encoded by one program. Of such a run the norms of its pieces are found first.
    """
    pieces, (order, widths, zero, clip) = pieces_of(groups), norm
    several = groups.size is None and max(pieces.counts) > 1
    if (pieces.size or 0) > TILE or (several and max(pieces.counts) > TILE) or isinstance(how, OffsetGrid):
        x = reference.times(joined(xs, torch.float32), factor)
        scales = group_scales(x, groups, *norm)
        codes_encode(codes, x, scales, groups, how, seeds, *decoded)
        return scales
    (x, at), times, scaled = _lying(xs), None if factor == 1 else factor, (widths, zero, clip or 0.0)
    norms = of_pieces(x, x, pieces, order, scaled, last=False, factor=times, at=at) if several else (None, None)
    scales, columns = x.new_empty(sum(groups.counts), dtype=torch.float32), triton.next_power_of_2(pieces.widths[0])
    lengths = groups.runs, pieces.counts, groups.counts
    runs = *lengths[:2], pieces.widths, *([*accumulate(each, initial=0)][:-1] for each in lengths)
    table = table_of(x.device, lambda: (*runs, at, *signed_keys_of(seeds)))
    tiles, (numbers, out) = tiles_of_each(pieces.counts, x.device, TILE // columns), decoded or (None, None)
    kind, grid = (how, ()) if isinstance(how, str) else ("uniform", tuple(how))
    sizes = {"ORDER": 0 if order == math.inf else int(order), "ZERO": zero, "CLIP": clip or 0.0}
    coded = {"HOW": kind, "GRID": grid, "LAST": 0 if numbers is None else numbers.numel() - 1}
    args = (codes, x, times, scales, numbers, out, *norms, widths, *table, tiles)
    launch(_encode_scaled, len(tiles), *args, **sizes, **coded, ROWS=TILE // columns, COLUMNS=columns, num_warps=8)
    return scales


def _lying(xs: Parts) -> tuple[Tensor, Ints]:
    """Return a tensor of at most 32 bits in which vectors lie, and where each begins."""
    if xs.flat.dtype == torch.float64:
        return joined(xs, torch.float32), cut_of_runs(xs.cut.lengths).offsets
    return xs.flat, xs.cut.offsets


def table_decode(out: Tensor, codes: Tensor, table: Tensor, scales: Tensor, groups: Groups) -> None:
    _run(_decode, (out, codes, table, scales), groups, [0] * len(groups.runs), LAST=table.numel() - 1)


def numbers_read(
    rows: Tensor, at: Packed, table: Tensor, groups: Groups, dtype: torch.dtype, wrong: Sequence[Tensor],
    fixed: Tensor, summed: bool, out: Tensor | Parts | None = None, flags: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    arrived, places = Arrived(rows, at, table, groups, dtype, wrong, fixed), [*accumulate(groups.runs, initial=0)][:-1]
    tiles, ranks, count = tiles_of_each(groups.runs, rows.device, _BLOCK), len(rows), sum(groups.runs)
    apart = isinstance(out, Parts) and out.cut.lengths != groups.runs and len(whole(out)) > 1
    if not count or apart or not aligned(arrived):
        return reference.numbers_read(*arrived, summed, out, flags)
    if isinstance(out, Parts):
        places, out = places if len(whole(out)) == 1 else [*out.cut.offsets], out.flat
    if out is None:
        out = torch.empty((count,) if summed else (ranks, count), dtype=dtype, device=rows.device)
    if flags is None:
        flags = torch.empty(1 + sum(map(len, wrong)), dtype=torch.bool, device=rows.device)
    begins, firsts = (accumulate(lengths, initial=0) for lengths in (groups.runs, groups.counts))
    rest = [n for column in zip(begins, groups.runs, firsts, groups.widths, places, strict=False) for n in column]
    columns = constant(tuple(rest), torch.int64, rows.device), tiles, len(tiles)
    args, sizes = lying(arrived, flags)
    like = out if out.dtype == dtype else out.new_empty(1, dtype=dtype)
    launch(_read, len(tiles) * (1 if summed else ranks), out, like, *columns, count, *args, SUMMED=summed, **sizes)
    return out, flags


def aligned(arrived: Arrived) -> bool:
    """Whether kernels can read scales, or plain numbers, where they lie."""
    rows, at = arrived[:2]
    first, width = (at.scales, 4) if at.bits else (at.codes, arrived.dtype.itemsize)
    return not ((rows.storage_offset() + first) % width or rows.stride(0) % width)


def lying(arrived: Arrived, flags: Tensor) -> tuple[tuple[Any, ...], dict[str, int]]:
    """Return the arguments and sizes that `any_failed` and `number_at` take."""
    rows, at, table, *_, wrong, fixed = arrived
    checks = [torch.cat(list(wrong))] if len(wrong) > _CHECKS else list(wrong)
    given = [x for check in [*checks, *[None] * _CHECKS][:_CHECKS] for x in (check, 0 if check is None else len(check))]
    args = (rows, rows.stride(0), len(rows), table, *at[:2], flags, *given, fixed, fixed.shape[1])
    return args, {"BITS": at.bits, "LAST": table.numel() - 1, "BLOCK": _BLOCK, "FIXED": FIXED}


def _run(kernel: Any, tensors: Sequence[Tensor | None], groups: Groups, seeds: Sequence[int], **constants: Any) -> None:
    """Launch a kernel on a single run, of which it knows where it begins, or on several."""
    assert tensors[0] is not None  # what is written
    device, numel = tensors[0].device, sum(groups.runs)
    if len(groups.runs) == 1 and not isinstance(seeds, Changing):
        place = (0, numel, 0, groups.widths[0], *signed_keys(seeds[0]), None)
        launch(kernel, tiles_of(numel, _BLOCK), *tensors, *place, **constants, BLOCK=_BLOCK)
        return
    begins, firsts = (list(accumulate(lengths, initial=0))[:-1] for lengths in (groups.runs, groups.counts))
    columns = table_of(device, lambda: (begins, groups.runs, firsts, groups.widths, *signed_keys_of(seeds)))
    tiles = tiles_of_each(groups.runs, device, _BLOCK)
    launch(kernel, len(tiles), *tensors, *columns, tiles, **constants, BLOCK=_BLOCK)


@triton.jit
def _given(x, scales, begin, n, first, group, high, low, tiles, BLOCK: tl.constexpr):
    """Return a tile of a run: its places in all and in the run, which exist, numbers, scales, and the run's keys."""
    if tiles is None:
        within = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    else:
        run = tl.load(tiles + 3 * tl.program_id(0))
        begin, n, first, group = tl.load(begin + run), tl.load(n + run), tl.load(first + run), tl.load(group + run)
        high, low = tl.load(high + run), tl.load(low + run)
        within = tl.load(tiles + 3 * tl.program_id(0) + 1).to(tl.int64) + tl.arange(0, BLOCK)
    there = within < n
    scale = tl.load(scales + first + within.to(tl.uint32) // group.to(tl.uint32), mask=there, other=1.0)
    return begin + within, within, there, tl.load(x + begin + within, mask=there, other=0.0), scale, high, low


@triton.jit
def _drawn(noise):
    return (noise >> 8).to(tl.float32) * 5.9604644775390625e-08  # 2⁻²⁴


@triton.jit
def _offset(value, scale, noise, HOW: tl.constexpr, GRID: tl.constexpr):
    SHIFT: tl.constexpr = GRID[0]
    BASE: tl.constexpr = GRID[1]
    POSITIVES: tl.constexpr = GRID[2]
    bits = tl.div_rn(value, scale).to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    size = magnitude.to(tl.float32, bitcast=True)
    smallest = tl.full(value.shape, BASE << SHIFT, tl.int32).to(tl.float32, bitcast=True)
    if HOW == "truncate":
        rounded = magnitude >> SHIFT
    elif HOW == "nearest":
        rounded = (magnitude + ((1 << SHIFT) >> 1)) >> SHIFT
        rounded = tl.maximum(rounded, tl.where(size >= smallest / 2, BASE, 0))
    else:
        rounded = (magnitude + (noise & ((1 << SHIFT) - 1)).to(tl.int32)) >> SHIFT
        upwards = tl.where(_drawn(noise) * smallest < size, BASE, 0)
        rounded = tl.where(magnitude < (BASE << SHIFT), upwards, rounded)
    index = tl.maximum(rounded - (BASE - 1), 0)
    negative = tl.where(index > 0, tl.minimum(index, GRID[3]) + POSITIVES, 0)
    return tl.where(bits < 0, negative, tl.minimum(index, POSITIVES))


@triton.jit
def _uniform(value, scale, noise, GRID: tl.constexpr):
    LEVELS: tl.constexpr = GRID[0]
    exact = tl.div_rn(value, scale) * LEVELS
    exact = tl.where(exact > LEVELS, LEVELS, tl.where(exact < -LEVELS, -LEVELS, exact))
    exact = tl.where(exact == exact, exact, 0)  # NaN has no code, and its scale is NaN too
    lower = tl.floor(exact)
    drawn = tl.full(value.shape, 0.5, tl.float32)
    if not GRID[1]:
        drawn = _drawn(noise)
    return lower.to(tl.int32) + LEVELS + (drawn < exact - lower).to(tl.int32)


@triton.jit(do_not_specialize=_NUMBERS)
def _encode(
    codes, x, scales, table, out, begin, n, first, group, high, low, tiles,
    HOW: tl.constexpr, GRID: tl.constexpr, LAST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at, within, there, value, scale, high, low = _given(x, scales, begin, n, first, group, high, low, tiles, BLOCK)
    _code(codes, table, out, at, there, value, scale, hash32(within, high, low), HOW, GRID, LAST)


@triton.jit
def _encode_scaled(
    codes, x, factor, scales, table, out, norms, spreads, widths,
    size, parts, width, begin, part, first, source, high, low, tiles,
    ORDER: tl.constexpr, ZERO: tl.constexpr, CLIP: tl.constexpr, HOW: tl.constexpr, GRID: tl.constexpr,
    LAST: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Encode groups, a row each; with norms, a piece of a run that is one group. The first piece writes its scale."""
    run, column = tl.load(tiles + 3 * tl.program_id(0)), tl.arange(0, COLUMNS)[None, :]
    row = tl.load(tiles + 3 * tl.program_id(0) + 1).to(tl.int64) + tl.arange(0, ROWS)
    within, n = row[:, None] * tl.load(width + run) + column, tl.load(size + run)
    there, place = (column < tl.load(width + run)) & (within < n), tl.load(first + run) + row
    at, mine = tl.load(begin + run) + within, row < tl.load(parts + run)
    x += tl.load(source + run) + within
    if norms is None:
        norm = norm_at(x, factor, there, ORDER)
        spread = norm
        if CLIP > 0:
            spread = norm_at(x, factor, there, 2)
    else:
        mine, place = row == 0, place - row
        among, inside = tl.load(part + run) + column, column < tl.load(parts + run)
        norm = norm_at(norms + among, None, inside, ORDER)
        spread = norm
        if CLIP > 0:
            spread = norm_at(spreads + among, None, inside, 2)
    many = widths if widths is None else widths + place
    scale = scale_of(norm, spread, many, row < tl.load(parts + run), ZERO, CLIP)
    tl.store(scales + place, scale, mask=mine)
    value = factored(x, factor, there)
    scale, noise = tl.broadcast_to(scale[:, None], value.shape), hash32(within, tl.load(high + run), tl.load(low + run))
    _code(codes, table, out, at, there, value, scale, noise, HOW, GRID, LAST)


@triton.jit
def _code(codes, table, out, at, there, value, scale, noise, HOW: tl.constexpr, GRID: tl.constexpr, LAST: tl.constexpr):
    """Write codes and, with a table, the numbers that they stand for."""
    if HOW == "ternary":
        found = tl.where(_drawn(noise) * scale < tl.abs(value), tl.where(value < 0, 2, 1), 0)
    elif HOW == "sign":
        found = (value < 0).to(tl.int32)
    elif HOW == "uniform":
        found = _uniform(value, scale, noise, GRID)
    else:
        found = _offset(value, scale, noise, HOW, GRID)
    if HOW != "sign":
        found = tl.where(scale != scale, 0, found)
    tl.store(codes + at, found.to(codes.dtype.element_ty), mask=there)
    if out is not None:
        number = tl.load(table + (found.to(tl.int32) & LAST), mask=there, other=0.0) * scale
        tl.store(out + at, number.to(out.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=_NUMBERS)
def _decode(
    out, codes, table, scales, begin, n, first, group, high, low, tiles, LAST: tl.constexpr, BLOCK: tl.constexpr
):
    at, _within, there, code, scale, _high, _low = _given(
        codes, scales, begin, n, first, group, high, low, tiles, BLOCK
    )
    value = tl.load(table + (code.to(tl.int32) & LAST), mask=there, other=0.0) * scale
    tl.store(out + at, value.to(out.dtype.element_ty), mask=there)


@triton.jit
def any_failed(
    rows, stride, ranks, flags, given, n, given_b, n_b, given_c, n_c, fixed, fixed_count,
    FIXED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return what `failed` does, with up to three tensors of flags."""
    wrong = failed(flags, rows, fixed, ranks, stride, fixed_count, given, n, FIXED, BLOCK)
    return wrong | any_of(flags, given_b, n_b, 1 + n, BLOCK) | any_of(flags, given_c, n_c, 1 + n + n_b, BLOCK)


@triton.jit
def number_at(row, table, scales, codes, at, scale, there, like, BITS: tl.constexpr, LAST: tl.constexpr):
    """Return numbers of a row, of the type of `like`."""
    if BITS == 0:
        plain = (row + codes).to(tl.pointer_type(like.dtype.element_ty), bitcast=True)
        found = tl.load(plain + at, mask=there, other=0)
    else:
        factor = tl.load((row + scales).to(tl.pointer_type(tl.float32), bitcast=True) + scale, mask=there, other=1.0)
        word = tl.zeros(at.shape, tl.int32)
        for j in tl.static_range((BITS + 14) // 8):  # a code overlaps at most this many bytes
            inside = there & (at * BITS // 8 + j <= (at * BITS + BITS - 1) // 8)
            word |= tl.load(row + codes + at * BITS // 8 + j, mask=inside, other=0).to(tl.int32) << (8 * j)
        code = (word >> (at * BITS % 8).to(tl.int32)) & LAST
        found = (tl.load(table + code, mask=there, other=0.0) * factor).to(like.dtype.element_ty)
    return found


@triton.jit(
    do_not_specialize=["stride", "scales", "codes", "programs", "ranks", "count", "n", "n_b", "n_c", "fixed_count"]
)
def _read(
    out, like, columns, tiles, programs, count,
    rows, stride, ranks, table, scales, codes, flags, given, n, given_b, n_b, given_c, n_c, fixed, fixed_count,
    BITS: tl.constexpr, LAST: tl.constexpr, SUMMED: tl.constexpr, BLOCK: tl.constexpr, FIXED: tl.constexpr,
):  # fmt: skip
    wrong = any_failed(
        rows, stride, ranks, flags, given, n, given_b, n_b, given_c, n_c, fixed, fixed_count, FIXED, BLOCK
    )
    rank, tile = (tl.program_id(0) // programs).to(tl.int64), tl.program_id(0) % programs
    run = columns + 5 * tl.load(tiles + 3 * tile)
    within = tl.load(tiles + 3 * tile + 1).to(tl.int64) + tl.arange(0, BLOCK)
    at, there = tl.load(run) + within, within < tl.load(run + 1)
    scale = tl.load(run + 2) + within.to(tl.uint32) // tl.load(run + 3).to(tl.uint32)
    total = wide(number_at(rows + rank * stride, table, scales, codes, at, scale, there, like, BITS, LAST))
    if SUMMED:
        for other in range(1, ranks):
            row = rows + tl.cast(other, tl.int64) * stride
            total += wide(number_at(row, table, scales, codes, at, scale, there, like, BITS, LAST))
    place = rank * count + tl.load(run + 4) + within
    tl.store(out + place, tl.where(wrong, 0.0, total).to(out.dtype.element_ty), mask=there)

"""The largest coefficients of every chunk, and their inverse transform.

A program takes several chunks. Their sizes are padded to powers of two, of at least 16 where a dot product runs along
them. 16-bit floats, and chunks too large for a program's registers, are left to the reference.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate as running
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.kernels.accumulate.triton import accumulate, arguments_of_each, of_vector, total
from thinwire.kernels.chunks import reference
from thinwire.kernels.chunks.chunking import Chunking
from thinwire.kernels.codes.reference import Arrived
from thinwire.kernels.codes.triton import aligned, any_failed, lying, number_at
from thinwire.kernels.parts import Vectors, wide_each
from thinwire.kernels.sums import Sum
from thinwire.kernels.triton import PROGRAMS, TILE, addresses, launch, magnitudes, pointer, table, tiles_of_each, wide

_FORWARD, _BACK = 1024, 2048
"""Elements, padding included, that a program takes at a time: few, as they wait in registers."""
_STEP = 16
"""The shortest sum that `tl.dot` takes, and the longest that does not need too many registers."""
_Put = tuple[Vectors, Tensor, Tensor, bool]
"""Vectors, their coefficients' positions and values, a row for each rank, and whether they are subtracted."""


def chunk_topk(xs: Vectors, chunkings: Sequence[Chunking]) -> tuple[Tensor, Tensor]:
    """See `reference.chunk_topk`. It takes one launch.

    Without a transform the result is the same. With one, sums run in another order: coefficients agree but for
    rounding, and so do the picks but for magnitudes that rounding makes change places. The choice is exact for the
    coefficients that are returned. Two calls on the same kind of GPU return the same bits.
    """
    return _largest(xs, chunkings, None) if _fit(xs[0], chunkings) else reference.chunk_topk(xs, chunkings)


def accumulate_chunk_topk(sums: Sum, chunkings: Sequence[Chunking]) -> tuple[Tensor, Tensor]:
    """See `reference.accumulate_chunk_topk`. Every element is in one chunk, and loaded once: its sum is made then."""
    if sums.how != "rounded" and _fit(sums.outs[0], chunkings):
        return _largest(sums.outs, chunkings, sums)
    accumulate(sums)
    return chunk_topk(wide_each(sums.outs), chunkings)


def chunk_put(outs: Vectors, positions: Tensor, values: Tensor, chunkings: Sequence[Chunking], subtract: bool) -> None:
    """See `reference.chunk_put`: the same bits, also as on a CPU. It takes one launch."""
    if not _fit(values, chunkings):
        reference.chunk_put(outs, positions, values, chunkings, subtract)
        return
    _put([(outs, positions, values, subtract)], chunkings)


def chunk_settle(
    outs: Vectors, positions: Tensor, arrived: Arrived, flags: Tensor, parts: Vectors, own: Tensor, own_values: Tensor,
    chunkings: Sequence[Chunking],
) -> None:  # fmt: skip
    """See `reference.chunk_settle`: one launch. Each program checks, and decodes codes."""
    groups, scaled = arrived.groups, arrived.at.bits > 0
    cut_alike = not scaled or groups.runs == tuple(cut.count for cut in chunkings)
    if not (positions.numel() and cut_alike and aligned(arrived) and _fit(own_values, chunkings)):
        reference.chunk_settle(outs, positions, arrived, flags, parts, own, own_values, chunkings)
        return
    scales = ([*running(groups.counts, initial=0)][:-1], groups.widths) if scaled else ()
    args, sizes = lying(arrived, flags)
    like = own_values.new_empty(1, dtype=arrived.dtype)
    puts = [(parts, own, own_values, True), (outs, positions, own_values, False)]
    _put(puts, chunkings, scales, (like, *args), **sizes)


class _Plan(NamedTuple):
    """How programs take the chunks of several vectors.

    `sizes` has for each kind how many chunks a program takes together, the padded height and width, and whether
    numbers are chosen as they are. Of each vector, `kinds` says which kind its chunks are, and `tiles` how many of
    them go together; `columns` are its elements, chunks, chunks side by side, columns, height, width, kept
    coefficients, and where these begin.
    """

    sizes: tuple[tuple[int, int, int, bool], ...]
    kinds: tuple[int, ...]
    tiles: tuple[int, ...]
    columns: tuple[tuple[int, ...], ...]
    warps: int


@lru_cache(maxsize=256)
def _plan(chunkings: tuple[Chunking, ...], least: int, tile: int) -> _Plan:
    each = [_sizes(cut, least, tile) for cut in chunkings]
    sizes, starts = tuple(sorted(set(each))), running((cut.count for cut in chunkings), initial=0)
    numbers = [
        (c.numel, c.chunks, c.across, c.columns, c.height, c.width, c.kept, start)
        for c, start in zip(chunkings, starts, strict=False)
    ]
    warps = max(max(4, min(16, height * width // 256)) for _, height, width, _ in sizes)
    kinds, tiles = tuple(map(sizes.index, each)), tuple(together for together, *_ in each)
    return _Plan(sizes, kinds, tiles, tuple(zip(*numbers, strict=True)), warps)


def _sizes(cut: Chunking, least: int, tile: int) -> tuple[int, int, int, bool]:
    """Return how many chunks a program takes together, their padded height and width, and whether they are plain."""
    width = max(least, triton.next_power_of_2(cut.width))
    height = max(least, triton.next_power_of_2(cut.height)) if cut.height > 1 else 1
    together = (tile if height > 1 else _FORWARD) // (height * width)  # rows alone take more registers
    return max(1, together), height, width, cut.transform is None


def _fit(values: Tensor, chunkings: Sequence[Chunking]) -> bool:
    """Whether the kernels here take numbers of this type and chunks of these sizes."""
    sizes = _plan(tuple(chunkings), _STEP, _FORWARD).sizes
    return values.element_size() >= 4 and all(height * width <= TILE for _, height, width, _ in sizes)


def _axes(chunkings: Sequence[Chunking], like: Tensor) -> Iterator[Sequence[Tensor]]:
    """Return the matrices A of all, and their matrices B."""
    keys = [(cut.height, cut.width, cut.transform) for cut in chunkings]
    found = {key: cut.axes(like) for key, cut in dict(zip(keys, chunkings, strict=True)).items()}
    return zip(*map(found.__getitem__, keys), strict=True)


def _largest(xs: Vectors, chunkings: Sequence[Chunking], sums: Sum | None) -> tuple[Tensor, Tensor]:
    """Return what `chunk_topk` does of vectors, or of sums that are made on the way."""
    count, like, plan = sum(cut.count for cut in chunkings), xs[0], _plan(tuple(chunkings), _STEP, _FORWARD)
    positions, values = torch.empty(count, dtype=torch.int16, device=like.device), like.new_empty(count)
    tiles = tiles_of_each(plan.columns[1], like.device, plan.tiles)
    columns: list[Any] = [*map(addresses, _axes(chunkings, like)), plan.kinds, *plan.columns]
    if sums is None:
        at, *rest = table(like.device, addresses(xs), *columns)
        of_each: tuple[Any, ...] = (None, at, *[None] * 6, *rest)
    else:
        of_each = tuple(arguments_of_each(sums, *columns))
    how = {"HOW": sums.how if sums else "given", "BITS": 8 * like.element_size() - 1, "STEP": _STEP}
    sizes = {"SIZES": plan.sizes, "KINDS": len(plan.sizes), "num_warps": plan.warps, "num_stages": 1}
    launch(_topk, len(tiles), like, positions, values, tiles, *of_each, **how, **sizes)
    return positions, values


def _put(
    puts: Sequence[_Put], chunkings: Sequence[Chunking], scales: Sequence[Sequence[int]] = (),
    arrived: tuple[Any, ...] = (None,) * 16, **read: int,
) -> None:  # fmt: skip
    """Write or subtract the inverse transform. Nothing fuses a product with a sum, as that would round once only.

    What arrived is written, and the first put subtracts. Of each vector, `scales` say which is the first, and for how
    many numbers each is.
    """
    (outs, positions, values, _), plan, many = puts[-1], _plan(tuple(chunkings), 1, _BACK), len(puts)
    tiles = tiles_of_each(plan.columns[1] * many, values.device, plan.tiles * many)
    programs, most = min(PROGRAMS, len(tiles)), max(n * height * width for n, height, width, _ in plan.sizes)
    room = values.new_empty(programs * most)
    vectors, each = [x for put in puts for x in put[0]], [put for put in puts for _ in put[0]]
    axes = [[*axis] * many for axis in _axes(chunkings, values)]
    at = vectors, [put[1] for put in each], [put[2] for put in each], *axes
    numbers = zip(*((*put[1].shape, put[3]) for put in each), strict=True)
    columns = ([*column] * many for column in (plan.kinds, *plan.columns, *(scales or plan.columns[:2])))
    of_each = table(room.device, *map(addresses, at), *columns, *numbers).unbind()
    args = (outs[0], vectors[0], positions, values, room, most, tiles, len(tiles), *of_each, *arrived)
    sizes = {"SIZES": plan.sizes, "KINDS": len(plan.sizes), "num_warps": plan.warps}
    launch(_inverse, programs, *args, **sizes, **(read or {"BITS": 0, "LAST": 0, "BLOCK": 1, "FIXED": 1}))


@triton.jit
def _origins(chunk, across, columns, height, width):
    return chunk // across * height * columns + chunk % across * width


@triton.jit
def _elements(sums, at, valid, HOW: tl.constexpr):
    """Return elements, which may be sums that are made and written now; 0 where there are none."""
    return tl.where(valid, total(sums, 0, at, valid, HOW), 0.0)


@triton.jit
def _coefficients(
    sums, a, b, chunk, n, chunks, across, columns, height, width,
    HOW: tl.constexpr, TOGETHER: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Return A·X·Bᵀ of some chunks, (TOGETHER, HEIGHT · WIDTH): first X·Bᵀ, the first row of each chunk before others.

    A chunk's sums meet no number of another chunk, which may not be finite.
    """
    row = tl.arange(0, HEIGHT * TOGETHER)
    i, number = row // TOGETHER, chunk + row % TOGETHER
    begin = _origins(number, across, columns, height, width) + i * columns
    there = (i < height) & (number < chunks)
    to = tl.arange(0, WIDTH)[None, :]
    z = tl.zeros([HEIGHT * TOGETHER, WIDTH], sums[0].dtype.element_ty)
    for first in range(0, WIDTH, STEP):
        j = first + tl.arange(0, STEP)
        at = begin[:, None] + j[None, :]
        valid = there[:, None] & (j < width)[None, :] & (at < n)
        part = _elements(sums, at, valid, HOW)
        weights = tl.load(b + to * width + j[:, None], mask=(to < width) & (j < width)[:, None], other=0.0)
        z = tl.dot(part, weights, z, input_precision="ieee", out_dtype=z.dtype)
    if HEIGHT > 1:
        j = tl.arange(0, HEIGHT)
        weights = tl.load(
            a + j[:, None] * height + j[None, :], mask=(j < height)[:, None] & (j < height)[None, :], other=0.0
        )
        half = tl.reshape(z, (HEIGHT, TOGETHER * WIDTH))
        z = tl.dot(weights, half, input_precision="ieee", out_dtype=z.dtype)
        z = tl.permute(tl.reshape(z, (HEIGHT, TOGETHER, WIDTH)), (1, 0, 2))
    return tl.reshape(z, (TOGETHER, HEIGHT * WIDTH))


@triton.jit
def _topk(
    like, positions, values, tiles, gradient_like,
    at, velocity_out, residual, velocity, gradient, scale, momentum,
    a, b, kinds, n, chunks, across, columns, height, width, kept, starts,
    HOW: tl.constexpr, SIZES: tl.constexpr, KINDS: tl.constexpr, BITS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    vector, chunk = tl.load(tiles + 3 * tl.program_id(0)), tl.load(tiles + 3 * tl.program_id(0) + 1).to(tl.int64)
    if HOW == "given":
        sums = pointer(at, vector, like), velocity_out, residual, velocity, gradient, scale, momentum, 0, 0
    else:
        sums = at, velocity_out, residual, velocity, gradient, scale, momentum, 0, 0
        sums = of_vector(like, gradient_like, sums, vector)
    positions, values = positions + tl.load(starts + vector), values + tl.load(starts + vector)
    for kind in tl.static_range(KINDS):
        if tl.load(kinds + vector) == kind:
            _choose(
                sums, pointer(a, vector, like), pointer(b, vector, like), positions, values, chunk,
                tl.load(n + vector), tl.load(chunks + vector), tl.load(across + vector), tl.load(columns + vector),
                tl.load(height + vector).to(tl.int32), tl.load(width + vector).to(tl.int32),
                tl.load(kept + vector).to(tl.int32),
                HOW, SIZES[kind][0], SIZES[kind][1], SIZES[kind][2], SIZES[kind][3], BITS, STEP,
            )  # fmt: skip


@triton.jit
def _choose(
    sums, a, b, positions, values, chunk, n, chunks, across, columns, height, width, kept,
    HOW: tl.constexpr, TOGETHER: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, PLAIN: tl.constexpr,
    BITS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Write which coefficients of a program's chunks are chosen."""
    mine = (chunk + tl.arange(0, TOGETHER))[:, None]
    i, j = tl.arange(0, HEIGHT * WIDTH) // WIDTH, tl.arange(0, HEIGHT * WIDTH) % WIDTH
    there = (mine < chunks) & ((i < height) & (j < width))[None, :]
    if PLAIN:
        place = _origins(mine, across, columns, height, width) + (i * columns + j)[None, :]
        z = _elements(sums, place, there & (place < n), HOW)
    else:
        z = _coefficients(
            sums, a, b, chunk, n, chunks, across, columns, height, width, HOW, TOGETHER, HEIGHT, WIDTH, STEP
        )
    bits = tl.where(there, magnitudes(z), -1)
    bar = tl.zeros([TOGETHER], bits.dtype)
    for digit in range(BITS):
        trial = bar | (tl.full([TOGETHER], 1, bits.dtype) << (BITS - 1 - digit))
        bar = tl.where(tl.sum((bits >= trial[:, None]).to(tl.int32), 1) >= kept, trial, bar)
    above, tied = (bits > bar[:, None]).to(tl.int32), (bits == bar[:, None]).to(tl.int32)
    within = tl.cumsum((above << 16) + tied, 1)
    allowed, ties_before = kept - tl.sum(above, 1)[:, None], (within & 0xFFFF) - tied
    place = mine * kept + (within >> 16) - above + tl.minimum(ties_before, allowed)
    taken = there & ((above > 0) | ((tied > 0) & (ties_before < allowed)))
    tl.store(positions + place, tl.broadcast_to((i * width + j)[None, :], taken.shape).to(tl.int16), mask=taken)
    tl.store(values + place, z, mask=taken)


@triton.jit(
    do_not_specialize=["most", "groups", "stride", "arrived", "scales", "codes", "n_a", "n_b", "n_c", "fixed_count"]
)
def _inverse(
    out, part, positions, values, room, most, tiles, groups,
    at, wheres, whats, a, b, kinds, n, chunks, across, columns, height, width, kept, starts, firsts, widths,
    ranks, each, subtract,
    like, rows, stride, arrived, table, scales, codes,
    flags, given, n_a, given_b, n_b, given_c, n_c, fixed, fixed_count,
    SIZES: tl.constexpr, KINDS: tl.constexpr,
    BITS: tl.constexpr, LAST: tl.constexpr, BLOCK: tl.constexpr, FIXED: tl.constexpr,
):  # fmt: skip
    """Sum coefficients times rows of B in the program's part of `room`; then sum these rows times columns of A.

    A rank has `each` coefficients, of all vectors. With rows, those that are not subtracted are read there, and
    count for nothing if a check fails.
    """
    wrong = False
    if rows is not None:
        wrong = any_failed(
            rows, stride, arrived, flags, given, n_a, given_b, n_b, given_c, n_c, fixed, fixed_count, FIXED, BLOCK
        )
    room += tl.program_id(0).to(tl.int64) * most
    for group in range(tl.program_id(0), groups, tl.num_programs(0)):
        vector, chunk = tl.load(tiles + 3 * group), tl.load(tiles + 3 * group + 1).to(tl.int64)
        many, taken = tl.load(ranks + vector), tl.load(subtract + vector)
        if rows is not None:
            many = tl.where(wrong & (taken == 0), 0, many)
        for kind in tl.static_range(KINDS):
            if tl.load(kinds + vector) == kind:
                _put_back(
                    pointer(at, vector, out), pointer(at, vector, part), taken, room, chunk,
                    pointer(wheres, vector, positions), pointer(whats, vector, values), many, tl.load(each + vector),
                    pointer(a, vector, values), pointer(b, vector, values),
                    tl.load(n + vector), tl.load(chunks + vector), tl.load(across + vector), tl.load(columns + vector),
                    tl.load(height + vector).to(tl.int32), tl.load(width + vector).to(tl.int32),
                    tl.load(kept + vector).to(tl.int32), tl.load(starts + vector),
                    tl.load(firsts + vector), tl.load(widths + vector),
                    like, rows, stride, table, scales, codes,
                    SIZES[kind][0], SIZES[kind][1], SIZES[kind][2], BITS, LAST,
                )  # fmt: skip


@triton.jit
def _put_back(
    out, part, taken, room, chunk, where_from, what_from, many, row_length, a, b,
    n, chunks, across, pitch, height, width, kept, first, first_scale, per_scale,
    like, rows, stride, table, scales, codes,
    TOGETHER: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """Write chunks to `out`; or, if `taken`, subtract them from `part`."""
    c, i, j = tl.arange(0, TOGETHER), tl.arange(0, HEIGHT), tl.arange(0, WIDTH)[None, :]
    line, chunk = room + c[:, None] * HEIGHT * WIDTH + j, chunk + c
    inside = chunk < chunks
    there = inside[:, None] & (j < width)
    tl.debug_barrier()
    for r in range(height):
        tl.store(line + r * WIDTH, tl.zeros([TOGETHER, WIDTH], room.dtype.element_ty))
    for rank in range(many):
        for pick in range(kept):
            place = first + chunk * kept + pick
            row = tl.cast(rank, tl.int64) * row_length
            where = tl.load(where_from + row + place, mask=inside, other=0).to(tl.int32)
            if rows is None:
                value = tl.load(what_from + row + place, mask=inside, other=0.0)
            else:
                plain = tl.load(what_from + place, mask=inside & (taken != 0), other=0.0)
                scale = first_scale + (chunk * kept + pick) // per_scale
                from_, coded = rows + tl.cast(rank, tl.int64) * stride, inside & (taken == 0)
                number = number_at(from_, table, scales, codes, place, scale, coded, like, BITS, LAST)
                value = tl.where(taken != 0, plain, wide(number).to(plain.dtype))
            row, column = where // width, where % width
            basis = tl.load(b + column[:, None] * width + j, mask=there, other=0.0)
            cell = line + row[:, None] * WIDTH
            tl.debug_barrier()  # one after the other
            tl.store(cell, tl.load(cell) + value[:, None] * basis)
    tl.debug_barrier()
    total = tl.zeros([TOGETHER, HEIGHT, WIDTH], room.dtype.element_ty)
    for r in range(height):
        weights = tl.load(a + r * height + i, mask=i < height, other=0.0)
        total += weights[None, :, None] * tl.load(line + r * WIDTH)[:, None, :]
    begin = _origins(chunk, across, pitch, height, width)[:, None] + j
    index = begin[:, None, :] + i[None, :, None] * pitch
    reached = there[:, None, :] & (i < height)[None, :, None] & (index < n)
    if taken != 0:
        left = tl.load(part + index, mask=reached, other=0.0) - total
        tl.store(part + index, left.to(part.dtype.element_ty), mask=reached)
    else:
        tl.store(out + index, total.to(out.dtype.element_ty), mask=reached)

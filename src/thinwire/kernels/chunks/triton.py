"""The largest coefficients of every chunk, and their inverse transform.

A program takes several chunks. Their sizes are padded to powers of two, of at least 16 where a dot product runs along
them. 16-bit floats, and chunks too large for a program's registers, are left to the reference.
"""

from collections.abc import Sequence
from itertools import accumulate as running
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.kernels.accumulate.triton import accumulate, arguments_of_each, of_vector, total
from thinwire.kernels.chunks import reference
from thinwire.kernels.chunks.chunking import Chunking, alike, shapes
from thinwire.kernels.codes.reference import Arrived
from thinwire.kernels.codes.triton import aligned, any_failed, lying, number_at
from thinwire.kernels.parts import Ints, Vectors, wide_each
from thinwire.kernels.sums import Sum
from thinwire.kernels.triton import PROGRAMS, TILE, addresses, launch, magnitudes, pointer, table, tiles_of_each, wide

_FORWARD, _BACK = 1024, 2048
"""Elements, padding included, that a program takes at a time: few, as they wait in registers."""
_STEP = 16
"""The shortest sum that `tl.dot` takes, and the longest that does not need too many registers."""
_Put = tuple[Vectors, Tensor, Tensor, bool]
"""Vectors, their coefficients' positions and values, a row for each rank, and whether they are subtracted."""


def chunk_topk(xs: Vectors, chunkings: Sequence[Chunking]) -> tuple[Tensor, Tensor]:
    """See `reference.chunk_topk`. Vectors with chunks of one size take one launch.

    Without a transform the result is the same. With one, sums run in another order: coefficients agree but for
    rounding, and so do the picks but for magnitudes that rounding makes change places. The choice is exact for the
    coefficients that are returned. Two calls on the same kind of GPU return the same bits.
    """
    return _largest(xs, chunkings, None) if _fit(xs[0], chunkings) else reference.chunk_topk(xs, chunkings)


def _largest(xs: Vectors, chunkings: Sequence[Chunking], sums: Sum | None) -> tuple[Tensor, Tensor]:
    """Return what `chunk_topk` does of vectors, or of sums that are made on the way."""
    count = sum(cut.count for cut in chunkings)
    positions, values = torch.empty(count, dtype=torch.int16, device=xs[0].device), xs[0].new_empty(count)
    for cuts, some, starts in alike(tuple(chunkings)):
        _choose([xs[i] for i in some], cuts, starts, positions, values, None if sums is None else sums.chosen(some))
    return positions, values


def accumulate_chunk_topk(sums: Sum, chunkings: Sequence[Chunking]) -> tuple[Tensor, Tensor]:
    """See `reference.accumulate_chunk_topk`. Every element is in one chunk, and loaded once: its sum is made then."""
    if sums.how != "rounded" and _fit(sums.outs[0], chunkings):
        return _largest(sums.outs, chunkings, sums)
    accumulate(sums)
    return chunk_topk(wide_each(sums.outs), chunkings)


def chunk_put(outs: Vectors, positions: Tensor, values: Tensor, chunkings: Sequence[Chunking], subtract: bool) -> None:
    """See `reference.chunk_put`: the same bits, also as on a CPU. Vectors with chunks of one size take one launch."""
    if not _fit(values, chunkings):
        reference.chunk_put(outs, positions, values, chunkings, subtract)
        return
    for cuts, some, starts in alike(tuple(chunkings)):
        _put([([outs[i] for i in some], positions, values, subtract)], cuts, starts)


def chunk_settle(
    outs: Vectors, positions: Tensor, arrived: Arrived, flags: Tensor, parts: Vectors, own: Tensor, own_values: Tensor,
    chunkings: Sequence[Chunking],
) -> None:  # fmt: skip
    """See `reference.chunk_settle`: one launch where `chunk_put` takes one. Each program checks, and decodes codes."""
    groups, scaled = arrived.groups, arrived.at.bits > 0
    cut_alike = not scaled or groups.runs == tuple(cut.count for cut in chunkings)
    if not (positions.numel() and cut_alike and aligned(arrived) and _fit(own_values, chunkings)):
        reference.chunk_settle(outs, positions, arrived, flags, parts, own, own_values, chunkings)
        return
    scales = [*running(groups.counts, initial=0)], groups.widths
    args, sizes = lying(arrived, flags)
    like = own_values.new_empty(1, dtype=arrived.dtype)
    for cuts, some, starts in alike(tuple(chunkings)):
        puts = [(parts, own, own_values, True), (outs, positions, own_values, False)]
        of_each = [[each[i] if scaled else 1 for i in some] for each in scales]
        _put([([put[0][i] for i in some], *put[1:]) for put in puts], cuts, starts, of_each, (like, *args), **sizes)


def _fit(values: Tensor, chunkings: Sequence[Chunking]) -> bool:
    """Whether the kernels here take numbers of this type and chunks of these sizes."""
    sizes = (_sizes(cuts[0], _STEP, 1) for cuts, *_ in alike(tuple(chunkings)))
    return values.element_size() >= 4 and all(each["HEIGHT"] * each["WIDTH"] <= TILE for each in sizes)


def _choose(
    xs: Vectors, cuts: Sequence[Chunking], starts: Ints, positions: Tensor, values: Tensor, sums: Sum | None
) -> None:
    cut, columns = cuts[0], (*shapes(cuts), starts)
    sizes = _sizes(cut, _STEP, _FORWARD)
    tiles = tiles_of_each(tuple(each.chunks for each in cuts), values.device, sizes["TOGETHER"])
    if sums is None:
        at, *rest = table(values.device, addresses(xs), *columns)
        of_each: Sequence[Any] = (None, at, *[None] * 6, *rest)
    else:
        of_each = arguments_of_each(sums, *columns)
    args = (xs[0], *cut.axes(xs[0]), positions, values, tiles, cut.height, cut.width, cut.kept, *of_each)
    how = {"PLAIN": cut.transform is None, "BITS": 8 * xs[0].element_size() - 1, "STEP": _STEP}
    launch(_topk, len(tiles), *args, HOW=sums.how if sums else "given", **sizes, **how, num_stages=1)


def _put(
    puts: Sequence[_Put], cuts: Sequence[Chunking], starts: Ints, scales: Sequence[Sequence[int]] = (),
    arrived: tuple[Any, ...] = (None,) * 16, **read: int,
) -> None:  # fmt: skip
    """Write or subtract the inverse transform. Nothing fuses a product with a sum, as that would round once only.

    What arrived is written, and the first put subtracts. Of each vector, `scales` say which is the first, and for how
    many numbers each is.
    """
    cut, (outs, positions, values, _) = cuts[0], puts[-1]
    sizes = _sizes(cut, 1, _BACK) | (read or {"BITS": 0, "LAST": 0, "BLOCK": 1, "FIXED": 1})
    tiles = tiles_of_each(tuple(each.chunks for each in cuts) * len(puts), values.device, sizes["TOGETHER"])
    programs = min(PROGRAMS, len(tiles))
    room = values.new_empty(programs * sizes["TOGETHER"] * sizes["HEIGHT"] * sizes["WIDTH"])
    vectors, each = [x for put in puts for x in put[0]], [put for put in puts for _ in put[0]]
    at = vectors, [put[1] for put in each], [put[2] for put in each]
    numbers = zip(*((*put[1].shape, put[3]) for put in each), strict=True)
    columns = ([*column] * len(puts) for column in (*shapes(cuts), starts, *(scales or (starts, starts))))
    of_each = table(room.device, *map(addresses, at), *columns, *numbers).unbind()
    like = (outs[0], vectors[0], positions, values, *cut.axes(values), room)
    args = (*like, tiles, len(tiles), cut.height, cut.width, cut.kept, *of_each, *arrived)
    launch(_inverse, programs, *args, **sizes)


def _sizes(chunking: Chunking, least: int, tile: int) -> dict[str, Any]:
    """Return the padded height and width of a chunk, how many chunks a program takes together, and its warps."""
    width = max(least, triton.next_power_of_2(chunking.width))
    height = max(least, triton.next_power_of_2(chunking.height)) if chunking.height > 1 else 1
    warps = max(4, min(16, height * width // 256))
    return {"TOGETHER": max(1, tile // (height * width)), "HEIGHT": height, "WIDTH": width, "num_warps": warps}


@triton.jit
def _origins(chunk, across, columns, height, width):
    return chunk // across * height * columns + chunk % across * width


@triton.jit
def _elements(x, velocity_out, residual, velocity, gradient, scale, momentum, at, valid, HOW: tl.constexpr):
    """Return elements of x, which may be sums that are made and written now; 0 where there are none."""
    found = total(x, velocity_out, residual, velocity, gradient, scale, momentum, 0, 0, 0, at, valid, HOW)
    return tl.where(valid, found, 0.0)


@triton.jit
def _coefficients(
    x, velocity_out, residual, velocity, gradient, scale, momentum, a, b, chunk,
    n, chunks, across, columns, height, width,
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
    z = tl.zeros([HEIGHT * TOGETHER, WIDTH], x.dtype.element_ty)
    for first in range(0, WIDTH, STEP):
        j = first + tl.arange(0, STEP)
        at = begin[:, None] + j[None, :]
        valid = there[:, None] & (j < width)[None, :] & (at < n)
        part = _elements(x, velocity_out, residual, velocity, gradient, scale, momentum, at, valid, HOW)
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


@triton.jit(do_not_specialize=["kept"])
def _topk(
    x, a, b, positions, values, tiles, height, width, kept, gradient_like,
    at, velocity_out, residual, velocity, gradient, scale, momentum, n, chunks, across, columns, starts,
    HOW: tl.constexpr, TOGETHER: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    PLAIN: tl.constexpr, BITS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    vector, chunk = tl.load(tiles + 3 * tl.program_id(0)), tl.load(tiles + 3 * tl.program_id(0) + 1).to(tl.int64)
    if HOW == "given":
        x = pointer(at, vector, x)
    else:
        x, velocity_out, residual, velocity, gradient, scale, momentum = of_vector(
            x, gradient_like, at, velocity_out, residual, velocity, gradient, scale, momentum, vector
        )
    n, chunks, start = tl.load(n + vector), tl.load(chunks + vector), tl.load(starts + vector)
    across, columns = tl.load(across + vector), tl.load(columns + vector)
    mine = (chunk + tl.arange(0, TOGETHER))[:, None]
    i, j = tl.arange(0, HEIGHT * WIDTH) // WIDTH, tl.arange(0, HEIGHT * WIDTH) % WIDTH
    there = (mine < chunks) & ((i < height) & (j < width))[None, :]
    if PLAIN:
        place = _origins(mine, across, columns, height, width) + (i * columns + j)[None, :]
        z = _elements(x, velocity_out, residual, velocity, gradient, scale, momentum, place, there & (place < n), HOW)
    else:
        z = _coefficients(
            x, velocity_out, residual, velocity, gradient, scale, momentum, a, b, chunk,
            n, chunks, across, columns, height, width, HOW, TOGETHER, HEIGHT, WIDTH, STEP,
        )  # fmt: skip
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
    tl.store(positions + start + place, tl.broadcast_to((i * width + j)[None, :], taken.shape).to(tl.int16), mask=taken)
    tl.store(values + start + place, z, mask=taken)


@triton.jit(
    do_not_specialize=[
        "groups", "kept", "stride", "arrived", "scales", "codes", "n_a", "n_b", "n_c", "fixed_count"
    ]
)  # fmt: skip
def _inverse(
    out, part, positions, values, a, b, room, tiles, groups, height, width, kept,
    at, wheres, whats, n, chunks, across, columns, starts, firsts, widths, ranks, each, subtract,
    like, rows, stride, arrived, table, scales, codes,
    flags, given, n_a, given_b, n_b, given_c, n_c, fixed, fixed_count,
    TOGETHER: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    BITS: tl.constexpr, LAST: tl.constexpr, BLOCK: tl.constexpr, FIXED: tl.constexpr,
):  # fmt: skip
    """Sum coefficients times rows of B in the program's part of `room`; then sum these rows times columns of A.

    A rank has `each` coefficients, of all vectors. With rows, those that are not subtracted are read there, and
    count for nothing if a check fails.
    """
    if rows is not None:
        wrong = any_failed(
            rows, stride, arrived, flags, given, n_a, given_b, n_b, given_c, n_c, fixed, fixed_count, FIXED, BLOCK
        )
    c, i, j = tl.arange(0, TOGETHER), tl.arange(0, HEIGHT), tl.arange(0, WIDTH)[None, :]
    line = room + (tl.program_id(0).to(tl.int64) * TOGETHER + c)[:, None] * HEIGHT * WIDTH + j
    for group in range(tl.program_id(0), groups, tl.num_programs(0)):
        vector, chunk = tl.load(tiles + 3 * group), tl.load(tiles + 3 * group + 1).to(tl.int64) + c
        inside, first = chunk < tl.load(chunks + vector), tl.load(starts + vector)
        where_from, what_from = pointer(wheres, vector, positions), pointer(whats, vector, values)
        many, row_length, taken = tl.load(ranks + vector), tl.load(each + vector), tl.load(subtract + vector)
        if rows is not None:
            many = tl.where(wrong & (taken == 0), 0, many)
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
                    scale = tl.load(firsts + vector) + (chunk * kept + pick) // tl.load(widths + vector)
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
        pitch = tl.load(columns + vector)
        begin = _origins(chunk, tl.load(across + vector), pitch, height, width)[:, None] + j
        index = begin[:, None, :] + i[None, :, None] * pitch
        reached = there[:, None, :] & (i < height)[None, :, None] & (index < tl.load(n + vector))
        if taken != 0:
            mine = pointer(at, vector, part)
            left = tl.load(mine + index, mask=reached, other=0.0) - total
            tl.store(mine + index, left.to(part.dtype.element_ty), mask=reached)
        else:
            tl.store(pointer(at, vector, out) + index, total.to(out.dtype.element_ty), mask=reached)

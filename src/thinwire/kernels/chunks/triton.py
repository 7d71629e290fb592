"""The largest coefficients of every chunk, and their inverse transform.

A program takes several chunks. Their sizes are padded to powers of two, of at least 16 where a dot product runs along
them. 16-bit floats, and chunks too large for a program's registers, are left to the reference.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.kernels.accumulate.triton import accumulate_fading
from thinwire.kernels.chunks import reference
from thinwire.kernels.chunks.chunking import Chunking
from thinwire.kernels.triton import PROGRAMS, TILE, launch, magnitudes, tiles_of

_FORWARD, _BACK = 1024, 2048
"""Elements, padding included, that a program takes at a time: few, as they wait in registers."""
_STEP = 16
"""The shortest sum that `tl.dot` takes, and the longest that does not need too many registers."""


def chunk_topk(x: Tensor, chunking: Chunking) -> tuple[Tensor, Tensor]:
    """See `reference.chunk_topk`.

    Without a transform the result is the same. With one, sums run in another order: coefficients agree but for
    rounding, and so do the picks but for magnitudes that rounding makes change places. The choice is exact for the
    coefficients that are returned. Two calls on the same kind of GPU return the same bits.
    """
    if not _fits(x, chunking):
        return reference.chunk_topk(x, chunking)
    positions = torch.empty(chunking.count, dtype=torch.int16, device=x.device)
    values, sizes = x.new_empty(chunking.count), _sizes(chunking, _STEP, _FORWARD)
    args = (x, *chunking.axes(x), positions, values, *_shape(chunking))
    how = {"PLAIN": chunking.transform is None, "BITS": 8 * x.element_size() - 1, "STEP": _STEP}
    launch(_topk, tiles_of(chunking.chunks, sizes["TOGETHER"]), *args, **sizes, **how, num_stages=1)
    return positions, values


def accumulate_fading_chunk_topk(
    out: Tensor, residual: Tensor, gradient: Tensor, scale: float, decay: float, chunking: Chunking
) -> tuple[Tensor, Tensor]:
    """See `reference.accumulate_fading_chunk_topk`. Two passes: a chunk takes all the registers there are."""
    accumulate_fading(out, residual, gradient, scale, decay)
    return chunk_topk(out, chunking)


def chunk_topk_each(xs: Sequence[Tensor], chunkings: Sequence[Chunking]) -> tuple[Tensor, Tensor]:
    """See `reference.chunk_topk_each`."""
    return _joined([chunk_topk(x, cut) for x, cut in zip(xs, chunkings, strict=True)])


def accumulate_fading_chunk_topk_each(
    outs: Sequence[Tensor],
    residuals: Sequence[Tensor],
    gradients: Sequence[Tensor],
    scales: Sequence[float],
    decays: Sequence[float],
    chunkings: Sequence[Chunking],
) -> tuple[Tensor, Tensor]:
    """See `reference.accumulate_fading_chunk_topk_each`."""
    columns = zip(outs, residuals, gradients, scales, decays, chunkings, strict=True)
    return _joined([accumulate_fading_chunk_topk(*each) for each in columns])


def chunk_put_each(
    outs: Sequence[Tensor], positions: Tensor, values: Tensor, chunkings: Sequence[Chunking], subtract: bool
) -> None:
    """See `reference.chunk_put_each`."""
    counts = [cut.count for cut in chunkings]
    parts = positions.split(counts, 1), values.split(counts, 1)
    for out, where, what, cut in zip(outs, *parts, chunkings, strict=True):
        _put(out, where.reshape(-1), what.reshape(-1), cut, subtract=subtract)


def _joined(found: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    positions, values = zip(*found, strict=True)
    return torch.cat(positions), torch.cat(values)


def chunk_write(out: Tensor, positions: Tensor, values: Tensor, chunking: Chunking) -> None:
    """See `reference.chunk_write`: the same bits, also as on a CPU."""
    _put(out, positions, values, chunking, subtract=False)


def chunk_subtract(out: Tensor, positions: Tensor, values: Tensor, chunking: Chunking) -> None:
    """See `reference.chunk_subtract`: the same bits, also as on a CPU."""
    _put(out, positions, values, chunking, subtract=True)


def _fits(values: Tensor, chunking: Chunking) -> bool:
    """Whether the kernels here take numbers of this type and chunks of this size."""
    sizes = _sizes(chunking, _STEP, 1)
    return values.element_size() >= 4 and sizes["HEIGHT"] * sizes["WIDTH"] <= TILE


def _put(out: Tensor, positions: Tensor, values: Tensor, chunking: Chunking, *, subtract: bool) -> None:
    """Write or subtract the inverse transform. Nothing fuses a product with a sum, as that would round once only."""
    if not _fits(values, chunking):
        return (reference.chunk_subtract if subtract else reference.chunk_write)(out, positions, values, chunking)
    sizes = _sizes(chunking, 1, _BACK)
    programs = min(PROGRAMS, tiles_of(chunking.chunks, sizes["TOGETHER"]))
    room = values.new_empty(programs * sizes["TOGETHER"] * sizes["HEIGHT"] * sizes["WIDTH"])
    ranks = values.numel() // max(1, chunking.count)
    whole = positions.contiguous(), values.contiguous()  # one coefficient of each rank is a column of a table
    args = (out, *whole, *chunking.axes(values), room, *_shape(chunking), ranks)
    launch(_inverse, programs, *args, **sizes, SUBTRACT=subtract)


def _shape(chunking: Chunking) -> tuple[int, ...]:
    sizes = chunking.height, chunking.width
    return chunking.numel, chunking.chunks, chunking.across, chunking.columns, *sizes, chunking.kept


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
def _coefficients(
    x, a, b, chunk,
    n, chunks, across, columns, height, width,
    TOGETHER: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr,
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
        part = tl.load(x + at, mask=there[:, None] & (j < width)[None, :] & (at < n), other=0.0)
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


@triton.jit(do_not_specialize=["chunks", "kept"])
def _topk(
    x, a, b, positions, values,
    n, chunks, across, columns, height, width, kept,
    TOGETHER: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    PLAIN: tl.constexpr, BITS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0).to(tl.int64) * TOGETHER
    mine = (chunk + tl.arange(0, TOGETHER))[:, None]
    i, j = tl.arange(0, HEIGHT * WIDTH) // WIDTH, tl.arange(0, HEIGHT * WIDTH) % WIDTH
    there = (mine < chunks) & ((i < height) & (j < width))[None, :]
    if PLAIN:
        at = _origins(mine, across, columns, height, width) + (i * columns + j)[None, :]
        z = tl.load(x + at, mask=there & (at < n), other=0.0)
    else:
        z = _coefficients(
            x, a, b, chunk, n, chunks, across, columns, height, width, TOGETHER, HEIGHT, WIDTH, STEP
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
    tl.store(positions + place, tl.broadcast_to((i * width + j)[None, :], taken.shape).to(tl.int16), mask=taken)
    tl.store(values + place, z, mask=taken)


@triton.jit(do_not_specialize=["chunks", "kept", "ranks"])
def _inverse(
    out, positions, values, a, b, room,
    n, chunks, across, columns, height, width, kept, ranks,
    TOGETHER: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, SUBTRACT: tl.constexpr,
):  # fmt: skip
    """Sum coefficients times rows of B in the program's part of `room`; then sum these rows times columns of A."""
    c, i, j = tl.arange(0, TOGETHER), tl.arange(0, HEIGHT), tl.arange(0, WIDTH)[None, :]
    line = room + (tl.program_id(0).to(tl.int64) * TOGETHER + c)[:, None] * HEIGHT * WIDTH + j
    for group in range(tl.program_id(0), tl.cdiv(chunks, TOGETHER), tl.num_programs(0)):
        chunk = tl.cast(group, tl.int64) * TOGETHER + c
        there = (chunk < chunks)[:, None] & (j < width)
        tl.debug_barrier()
        for r in range(height):
            tl.store(line + r * WIDTH, tl.zeros([TOGETHER, WIDTH], room.dtype.element_ty))
        for rank in range(ranks):
            for pick in range(kept):
                place = (tl.cast(rank, tl.int64) * chunks + chunk) * kept + pick
                at = tl.load(positions + place, mask=chunk < chunks, other=0).to(tl.int32)
                value = tl.load(values + place, mask=chunk < chunks, other=0.0)
                row, column = at // width, at % width
                basis = tl.load(b + column[:, None] * width + j, mask=there, other=0.0)
                to = line + row[:, None] * WIDTH
                tl.debug_barrier()  # one after the other
                tl.store(to, tl.load(to) + value[:, None] * basis)
        tl.debug_barrier()
        total = tl.zeros([TOGETHER, HEIGHT, WIDTH], room.dtype.element_ty)
        for r in range(height):
            weights = tl.load(a + r * height + i, mask=i < height, other=0.0)
            total += weights[None, :, None] * tl.load(line + r * WIDTH)[:, None, :]
        begin = _origins(chunk, across, columns, height, width)[:, None] + j
        index = begin[:, None, :] + i[None, :, None] * columns
        reached = there[:, None, :] & (i < height)[None, :, None] & (index < n)
        if SUBTRACT:
            total = tl.load(out + index, mask=reached, other=0.0) - total
        tl.store(out + index, total.to(out.dtype.element_ty), mask=reached)

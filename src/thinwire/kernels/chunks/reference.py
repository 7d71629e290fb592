"""The largest coefficients of every chunk of a tensor, and their inverse transform."""

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.kernels.accumulate.reference import accumulate_fading
from thinwire.kernels.chunks.chunking import Chunking
from thinwire.kernels.select.reference import magnitude_bits


def chunk_topk(x: Tensor, chunking: Chunking) -> tuple[Tensor, Tensor]:
    """Transform every chunk of flat `x`, and pick its `kept` largest coefficients by magnitude.

    Return their positions within the chunk, int16 (count), ascending in each chunk, and the coefficients (count). Lower
    positions win ties, and NaN counts as largest.
    """
    a, b = chunking.axes(x)
    z = (a @ _chunks(x, chunking) @ b.T).flatten(1)
    order = magnitude_bits(z).sort(dim=1, descending=True, stable=True).indices
    positions = order[:, : chunking.kept].sort(dim=1).values
    return positions.to(torch.int16).view(-1), z.gather(1, positions).view(-1)


def accumulate_fading_chunk_topk(
    out: Tensor, residual: Tensor, gradient: Tensor, scale: float, decay: float, chunking: Chunking
) -> tuple[Tensor, Tensor]:
    """Do `accumulate_fading`, and then `chunk_topk` of `out`, in one pass."""
    accumulate_fading(out, residual, gradient, scale, decay)
    return chunk_topk(out, chunking)


def chunk_topk_each(xs: Sequence[Tensor], chunkings: Sequence[Chunking]) -> tuple[Tensor, Tensor]:
    """`chunk_topk` of each of n ≥ 1 vectors: what is found of one after what is found of another."""
    return _joined([chunk_topk(x, cut) for x, cut in zip(xs, chunkings, strict=True)])


def accumulate_fading_chunk_topk_each(
    outs: Sequence[Tensor],
    residuals: Sequence[Tensor],
    gradients: Sequence[Tensor],
    scales: Sequence[float],
    decays: Sequence[float],
    chunkings: Sequence[Chunking],
) -> tuple[Tensor, Tensor]:
    """`accumulate_fading_chunk_topk` of each."""
    columns = zip(outs, residuals, gradients, scales, decays, chunkings, strict=True)
    return _joined([accumulate_fading_chunk_topk(*each) for each in columns])


def chunk_put_each(
    outs: Sequence[Tensor], positions: Tensor, values: Tensor, chunkings: Sequence[Chunking], subtract: bool
) -> None:
    """`chunk_write` to each of several vectors, or `chunk_subtract`.

    `positions` and `values` have a row for each rank (ranks, Σ count): one vector's coefficients after another's.
    """
    change = chunk_subtract if subtract else chunk_write
    counts = [cut.count for cut in chunkings]
    parts = positions.split(counts, 1), values.split(counts, 1)
    for out, where, what, cut in zip(outs, *parts, chunkings, strict=True):
        change(out, where.reshape(-1), what.reshape(-1), cut)


def chunk_write(out: Tensor, positions: Tensor, values: Tensor, chunking: Chunking) -> None:
    """Overwrite flat `out` with the inverse transform of coefficients, which several ranks may have chosen.

    `positions` (int16) and `values` hold `count` coefficients of one rank after those of another. Every product and sum
    is rounded on its own, in a fixed order, so that every CPU gives the same bits.
    """
    out.copy_(_inverse(positions, values, chunking))


def chunk_subtract(out: Tensor, positions: Tensor, values: Tensor, chunking: Chunking) -> None:
    """Subtract what `chunk_write` would write."""
    out.sub_(_inverse(positions, values, chunking))


def _joined(found: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    positions, values = zip(*found, strict=True)
    return torch.cat(positions), torch.cat(values)


def _chunks(x: Tensor, chunking: Chunking) -> Tensor:
    """Return the chunks of flat `x`: (chunks, height, width)."""
    room = chunking.chunks * chunking.size
    grid = (chunking.down, chunking.height, chunking.across, chunking.width)
    padded = torch.nn.functional.pad(x, (0, room - x.numel())).view(grid)
    return padded.transpose(1, 2).reshape(-1, chunking.height, chunking.width)


def _inverse(positions: Tensor, values: Tensor, chunking: Chunking) -> Tensor:
    """Return Aᵀ·Z·B of every chunk, put back into a flat tensor. Sums run in order of ranks, positions and rows."""
    a, b = chunking.axes(values)
    rows, x = (values.new_zeros(chunking.chunks, chunking.height, chunking.width) for _ in range(2))
    every = torch.arange(chunking.chunks, device=values.device)
    ranks = values.numel() // max(1, chunking.count)
    shape = (ranks, chunking.chunks, chunking.kept)
    for where, coefficients in zip(positions.long().view(shape), values.view(shape), strict=True):
        for at, value in zip(where.T, coefficients.T, strict=True):
            rows[every, at // chunking.width] += value[:, None] * b[at % chunking.width]
    for r in range(chunking.height):
        x += a[r, :, None] * rows[:, r, None, :]
    grid = (chunking.down, chunking.across, chunking.height, chunking.width)
    return x.view(grid).transpose(1, 2).reshape(-1)[: chunking.numel]

"""The largest coefficients of every chunk of several tensors, and their inverse transform."""

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.kernels.accumulate.reference import accumulate
from thinwire.kernels.chunks.chunking import Chunking
from thinwire.kernels.codes.reference import Arrived, numbers_read
from thinwire.kernels.parts import Vectors, wide_each
from thinwire.kernels.select.reference import magnitude_bits
from thinwire.kernels.sums import Sum


def chunk_topk(xs: Vectors, chunkings: Sequence[Chunking]) -> tuple[Tensor, Tensor]:
    """Transform every chunk of n ≥ 1 flat vectors, and pick its `kept` largest coefficients by magnitude.

    Return their positions within the chunk, int16 (count), ascending in each chunk, and the coefficients (count): those
    of one vector after another's. Lower positions win ties, and NaN counts as largest.
    """
    positions, values = zip(*map(_topk, xs, chunkings), strict=True)
    return torch.cat(positions), torch.cat(values)


def _topk(x: Tensor, chunking: Chunking) -> tuple[Tensor, Tensor]:
    a, b = chunking.axes(x)
    z = (a @ _chunks(x, chunking) @ b.T).flatten(1)
    order = magnitude_bits(z).sort(dim=1, descending=True, stable=True).indices
    positions = order[:, : chunking.kept].sort(dim=1).values
    return positions.to(torch.int16).view(-1), z.gather(1, positions).view(-1)


def accumulate_chunk_topk(sums: Sum, chunkings: Sequence[Chunking]) -> tuple[Tensor, Tensor]:
    """`accumulate`, then `chunk_topk` of the outs, in float32 or wider."""
    accumulate(sums)
    return chunk_topk(wide_each(sums.outs), chunkings)


def chunk_put(outs: Vectors, positions: Tensor, values: Tensor, chunkings: Sequence[Chunking], subtract: bool) -> None:
    """Overwrite flat vectors with the inverse transform of coefficients, or subtract it from them.

    `positions` (int16) and `values` have a row for each rank (ranks, Σ count): one vector's coefficients after
    another's. Every product and sum is rounded on its own, in a fixed order, so that every CPU gives the same bits.
    """
    counts = [cut.count for cut in chunkings]
    parts = positions.split(counts, 1), values.split(counts, 1)
    for out, where, what, cut in zip(outs, *parts, chunkings, strict=True):
        found = _inverse(where, what, cut)
        out.copy_(out - found if subtract else found)


def chunk_settle(
    outs: Vectors, positions: Tensor, arrived: Arrived, flags: Tensor, parts: Vectors, own: Tensor, own_values: Tensor,
    chunkings: Sequence[Chunking],
) -> None:  # fmt: skip
    """Subtract this rank's own coefficients, and put the sum of all ranks' ones, as `chunk_put` does.

    The numbers of all are read as `numbers_read` does, and the flags written that it returns.
    """
    chunk_put(parts, own, own_values, chunkings, True)
    values, found = numbers_read(*arrived, summed=False)
    flags.copy_(found)
    chunk_put(outs, positions, values.to(own_values.dtype), chunkings, False)


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
    shape = (values.shape[0], chunking.chunks, chunking.kept)
    for where, coefficients in zip(positions.long().reshape(shape), values.reshape(shape), strict=True):
        for at, value in zip(where.T, coefficients.T, strict=True):
            rows[every, at // chunking.width] += value[:, None] * b[at % chunking.width]
    for r in range(chunking.height):
        x += a[r, :, None] * rows[:, r, None, :]
    grid = (chunking.down, chunking.across, chunking.height, chunking.width)
    return x.view(grid).transpose(1, 2).reshape(-1)[: chunking.numel]

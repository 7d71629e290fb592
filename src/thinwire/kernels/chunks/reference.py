"""The largest coefficients of every chunk of a tensor, their inverse transform, and numbers for their positions."""

import torch
from torch import Tensor

from thinwire.kernels.chunks.chunking import Chunking, Numbering
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


def chunk_write(out: Tensor, positions: Tensor, values: Tensor, chunking: Chunking) -> None:
    """Overwrite flat `out` with the inverse transform of coefficients, which several ranks may have chosen.

    `positions` (int16) and `values` hold `count` coefficients of one rank after those of another. Every product and sum
    is rounded on its own, in a fixed order, so that every CPU gives the same bits.
    """
    out.copy_(_inverse(positions, values, chunking))


def chunk_subtract(out: Tensor, positions: Tensor, values: Tensor, chunking: Chunking) -> None:
    """Subtract what `chunk_write` would write."""
    out.sub_(_inverse(positions, values, chunking))


def subsets_encode(positions: Tensor, numbering: Numbering) -> Tensor:
    """Number every `kept` of `positions` (int16, ascending, below `space`): uint8 (⌈numbers · bits / 8⌉), packed.

    p₀ < p₁ < … have the number Σ C(pᵢ, i + 1) (the combinatorial number system; Cover 1973). The least significant bit
    comes first.
    """
    table, bits = numbering.table(positions), numbering.bits
    numbers = table.gather(1, positions.view(-1, numbering.kept).T.long()).sum(0)
    ones = (numbers[:, None] >> torch.arange(bits, device=positions.device)) & 1
    ones = torch.nn.functional.pad(ones.view(-1), (0, -ones.numel() % 8)).view(-1, 8).to(torch.uint8)
    return (ones << torch.arange(8, dtype=torch.uint8, device=positions.device)).sum(1, dtype=torch.uint8)


def subsets_decode(rows: Tensor, count: int, numbering: Numbering) -> Tensor:
    """Return the positions, int16 (ranks, count · kept), of the `count` numbers in each of `rows` (ranks, bytes).

    If `subsets_encode` cannot have written a row, its positions are all −1: a number is too large, or padding not zero.
    """
    bits, ranks = numbering.bits, rows.shape[0]
    ones = ((rows[..., None] >> torch.arange(8, dtype=torch.uint8, device=rows.device)) & 1).view(ranks, -1)
    digits = ones[:, : count * bits].view(ranks, count, bits).long()
    rest = (digits << torch.arange(bits, device=rows.device)).sum(2)
    wrong = (rest >= numbering.subsets).any(1) | ones[:, count * bits :].bool().any(1)
    found = []
    for row in numbering.table(rows).flip(0):
        found.append(torch.searchsorted(row, rest, right=True) - 1)
        rest = rest - row[found[-1]]
    positions = torch.stack(found[::-1], dim=2).to(torch.int16).view(ranks, -1)
    return positions.masked_fill_(wrong[:, None], -1)


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

"""Sorted positions as numbers of a few bits, and back."""

import torch
from torch import Tensor

from thinwire.kernels.subsets.numbering import Numbering


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

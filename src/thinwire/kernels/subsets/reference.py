"""Sorted positions as numbers of a few bits, and back."""

import torch
from torch import Tensor

from thinwire.kernels.memory import constant
from thinwire.kernels.subsets.numbering import DIGIT, Numbering, digits_of

_MOST = (1 << DIGIT) - 1


def subsets_encode(positions: Tensor, numbering: Numbering) -> Tensor:
    """Number every `kept` of `positions` (int16, ascending, below `space`): uint8 (⌈numbers · bits / 8⌉), packed.

    p₀ < p₁ < … have the number Σ C(pᵢ, i + 1) (the combinatorial number system; Cover 1973). The least significant bit
    comes first.
    """
    table, bits = numbering.table(positions), numbering.bits
    places = positions.view(-1, numbering.kept).T.long()
    numbers = places.new_zeros(len(table), places.shape[1])
    for i, at in enumerate(places):
        numbers = _carried(numbers + table[:, i, at], 1)
    ones = torch.cat([(digit[:, None] >> torch.arange(DIGIT, device=digit.device)) & 1 for digit in numbers], dim=1)
    ones = ones[:, :bits].reshape(-1)
    ones = torch.nn.functional.pad(ones, (0, -ones.numel() % 8)).view(-1, 8).to(torch.uint8)
    return (ones << torch.arange(8, dtype=torch.uint8, device=positions.device)).sum(1, dtype=torch.uint8)


def subsets_decode(rows: Tensor, count: int, numbering: Numbering) -> Tensor:
    """Return the positions, int16 (ranks, count · kept), of the `count` numbers in each of `rows` (ranks, bytes).

    If `subsets_encode` cannot have written a row, its positions are all −1: a number is too large, or padding not zero.
    """
    bits, ranks, table = numbering.bits, rows.shape[0], numbering.table(rows)
    ones = ((rows[..., None] >> torch.arange(8, dtype=torch.uint8, device=rows.device)) & 1).view(ranks, -1)
    parts = ones[:, : count * bits].view(ranks, count, bits).long().split(DIGIT, dim=2)
    digits = [(part << torch.arange(part.shape[2], device=rows.device)).sum(2) for part in parts]
    rest = torch.stack([*digits, *(torch.zeros_like(digits[0]) for _ in range(len(table) - len(digits)))])
    subsets = constant(tuple(digits_of(numbering.subsets, len(table))), torch.int64, rows.device)
    wrong = _at_most(subsets[:, None, None], rest).any(1) | ones[:, count * bits :].bool().any(1)
    found = []
    for i in range(numbering.kept - 1, -1, -1):
        found.append(_last_within(table[:, i], rest))
        rest = _carried(rest - table[:, i, found[-1]], -1)
    positions = torch.stack(found[::-1], dim=2).to(torch.int16).view(ranks, -1)
    return positions.masked_fill_(wrong[:, None], -1)


def _last_within(binomials: Tensor, numbers: Tensor) -> Tensor:
    """Return the largest p whose binomial, of (digits, space) ascending ones, is at most each number."""
    low = torch.zeros_like(numbers[0])
    for step in reversed(range(binomials.shape[1].bit_length())):
        ahead = low + (1 << step)
        inside = ahead < binomials.shape[1]
        within = _at_most(binomials[:, ahead.clamp_max(binomials.shape[1] - 1)], numbers)
        low = torch.where(inside & within, ahead, low)
    return low


def _at_most(one: Tensor, other: Tensor) -> Tensor:
    """Whether numbers (digits, …) are at most others."""
    found = torch.ones_like(one[0] <= other[0])
    for mine, others in zip(one, other, strict=True):
        found = (mine < others) | ((mine == others) & found)
    return found


def _carried(numbers: Tensor, carry: int) -> Tensor:
    """Return numbers (digits, …) whose digits were added to others, or had others subtracted: the sign is the carry."""
    if len(numbers) == 1:
        return numbers
    low, high = numbers
    return torch.stack([low & _MOST, high + carry * (low < 0)])

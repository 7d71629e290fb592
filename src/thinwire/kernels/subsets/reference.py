"""Sorted positions as numbers of a few bits, and back: the combinatorial number system."""

from math import comb
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from thinwire.kernels.memory import constant, kept, sent
from thinwire.kernels.parts import Array

DIGIT = 63
"""Bits of a digit: a number of 64 bits with a sign holds it."""
_DIGITS, _MOST = 2, (1 << DIGIT) - 1


class Numbering(NamedTuple):
    """How a chunk's positions travel: the lowest `low_bits` of each as they are, the rest as the number of a subset.

    The high parts p >> low_bits may repeat. Plus their rank, 0, 1, …, they are `kept` of `space` numbers. The number of
    a subset has up to two digits of 63 bits.
    """

    low_bits: int
    space: int
    kept: int

    @classmethod
    def of(cls, size: int, kept: int) -> Self | None:
        """Return the numbering of `kept` of `size` positions with the fewest low bits, or None if no digits suffice.

        One digit it is, unless a second saves more than a quarter of a bit for each position.
        """
        short, long = (cls._within(size, kept, digits * DIGIT) for digits in (1, _DIGITS))
        if short is None or long is None:
            return short or long
        return long if 4 * (short._cost - long._cost) > kept else short

    @classmethod
    def _within(cls, size: int, kept: int, most: int) -> Self | None:
        for low_bits in range(size.bit_length()):
            space = ((size - 1) >> low_bits) + kept if low_bits else size
            if comb(space, min(kept, space // 2)) < 1 << most:
                return cls(low_bits, space, kept)
        return None

    @property
    def _cost(self) -> int:
        return self.bits + self.kept * self.low_bits

    @property
    def subsets(self) -> int:
        """How many there are."""
        return comb(self.space, self.kept)

    @property
    def bits(self) -> int:
        """How many bits number one."""
        return (self.subsets - 1).bit_length()

    @property
    def digits(self) -> int:
        """How many digits the binomials have."""
        return 1 if comb(self.space, min(self.kept, self.space // 2)) < 1 << DIGIT else _DIGITS

    def binomials(self, digits: int) -> Array:
        """Return C(p, i + 1) for i < `kept` and p < `space`: int64 (digits, kept, space), the lowest digits first."""
        rows = [[digits_of(comb(p, i + 1), digits) for p in range(self.space)] for i in range(self.kept)]
        return np.array(rows, np.int64).reshape(self.kept, self.space, digits).transpose(2, 0, 1)


class Numbered(NamedTuple):
    """A run of regions that are cut alike: how many there are, and how many numbers each takes."""

    numbering: Numbering
    regions: int
    numbers: int

    @property
    def nbytes(self) -> int:
        """How many bytes the numbers of a region take."""
        return -(-self.numbers * self.numbering.bits // 8)

    @property
    def positions(self) -> int:
        """How many positions all regions have."""
        return self.regions * self.numbers * self.numbering.kept


def digits_of(number: int, count: int) -> list[int]:
    """Return a number's digits, the lowest first."""
    return [number >> place * DIGIT & ((1 << DIGIT) - 1) for place in range(count)]


@kept
def table_of(numbering: Numbering, device: torch.device) -> Tensor:
    """Return the binomials of as many digits as they have, on a device."""
    return sent(torch.from_numpy(numbering.binomials(numbering.digits).copy()), device)


def subsets_encode(positions: Tensor, runs: tuple[Numbered, ...]) -> Tensor:
    """Number every `kept` of `positions`, int16 (n), ascending and below `space`: run after run, region after region.

    Return uint8 (Σ regions · ⌈count · bits / 8⌉), in which each region is packed: p₀ < p₁ < … have the number
    Σ C(pᵢ, i + 1) (the combinatorial number system; Cover 1973). The least significant bit comes first.
    """
    parts = positions.split([run.positions for run in runs])
    of_each = zip(parts, runs, strict=True)
    return torch.cat([_packed(part.view(run.regions, -1), run.numbering).view(-1) for part, run in of_each])


def _packed(positions: Tensor, numbering: Numbering) -> Tensor:
    table, bits = table_of(numbering, positions.device), numbering.bits
    places = positions.reshape(-1, numbering.kept).T.long()
    numbers = places.new_zeros(len(table), places.shape[1])
    for i, at in enumerate(places):
        numbers = _carried(numbers + table[:, i, at], 1)
    ones = torch.cat([(digit[:, None] >> torch.arange(DIGIT, device=digit.device)) & 1 for digit in numbers], dim=1)
    ones = ones[:, :bits].reshape(len(positions), positions.shape[1] // numbering.kept * bits)
    ones = torch.nn.functional.pad(ones, (0, -ones.shape[1] % 8)).to(torch.uint8)
    ones = ones.view(len(positions), ones.shape[1] // 8, 8)
    return (ones << torch.arange(8, dtype=torch.uint8, device=positions.device)).sum(2, dtype=torch.uint8)


def subsets_decode(rows: Tensor, count: int, numbering: Numbering) -> Tensor:
    """Return the positions, int16 (ranks, count · kept), of the `count` numbers in each of `rows` (ranks, bytes).

    If `subsets_encode` cannot have written a row, a position is −1, or more of them: a number is too large, or padding
    not zero.
    """
    bits, ranks, table = numbering.bits, rows.shape[0], table_of(numbering, rows.device)
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


def subsets_read(rows: Tensor, runs: tuple[Numbered, ...]) -> tuple[Tensor, Tensor]:
    """Return what each rank gave `subsets_encode`, (ranks, n), and bools: any is set if a row is malformed."""
    parts = rows.split([run.regions * run.nbytes for run in runs], dim=1)
    found = [
        subsets_decode(part.reshape(len(rows) * run.regions, -1), run.numbers, run.numbering).view(len(rows), -1)
        for part, run in zip(parts, runs, strict=True)
    ]
    positions = torch.cat(found, dim=1)
    return positions.clamp(min=0), (positions < 0).any()


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

"""How a payload names its rows (docs/explanation/wire-format.md): by numbers, a bitmap, an Elias-Fano code or slots."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.errors import PayloadError
from thinwire.kernels import EliasFano, Section
from thinwire.kernels.memory import constant
from thinwire.payloads import slots
from thinwire.payloads.base import Regions
from thinwire.payloads.wire import BITMAP, ELIAS_FANO, NUMBERS, SLOTS, padded
from thinwire.waits import known, on_host, refuse_if

CODINGS = NUMBERS, BITMAP, ELIAS_FANO
"""How rows may be named that ascend without repeats."""
LARGEST_SPACE = 2**31 - 1
"""The largest int32 number."""


def length(coding: int, count: int, space: int) -> int:
    """Return how many bytes name `count` of `space` rows."""
    return {NUMBERS: 4 * count, BITMAP: -(-space // 8), ELIAS_FANO: EliasFano.of(count, space).nbytes}[coding]


def nbytes(coding: int, count: int, space: int) -> int:
    """Return the same, padding included."""
    return padded(length(coding, count, space))


def shortest(count: int, space: int, codings: tuple[int, ...]) -> int:
    """Return the shortest of `codings`; on a tie, the one with the lowest code."""
    return min(codings, key=lambda coding: (nbytes(coding, count, space), coding))


def checked(
    keys: Tensor, edges: Sequence[int], least: int | None, error: Callable[[], PayloadError] | None = None
) -> Tensor:
    """Return integers (rows, n) that are as `kernels.misplaced` wants them; if faults are only noted, moved inside.

    Raises what `error` returns otherwise.
    """
    if not keys.numel():
        return keys
    inside = None if on_host(keys) else torch.empty_like(keys, memory_format=torch.contiguous_format)
    wrong = kernels.misplaced(keys, constant(tuple(edges), keys.dtype, keys.device), least, inside)
    refuse_if(wrong, error or partial(_malformed, keys, edges, edges[-1], None))
    return keys if inside is None else inside


def _malformed(keys: Tensor, edges: Sequence[int], space: int, code: str | None) -> PayloadError:
    low, high = map(int, torch.aminmax(keys))
    if code and low < 0:
        return PayloadError(code)
    if low < 0 or high >= space:
        return PayloadError(f"indices reach from {low} to {high}; expected 0 to {space - 1}")
    places = torch.searchsorted(
        torch.tensor(edges, dtype=keys.dtype, device="cpu"), keys.cpu().contiguous(), right=True
    )
    if outside := int((places % 2 == 0).sum()):
        return PayloadError(f"{outside} of {keys.numel()} indices lie outside the payload's regions")
    return PayloadError("indices do not ascend; declare another order with ascending=False or seeds")


def _bitmap(row: Tensor, count: int) -> Tensor:
    # Bits beyond the space are padding. If one is set, it reads as a key out of range.
    keys, found = kernels.ones(kernels.unpack_bits(row, 8 * row.numel(), 1, torch.uint8), count)
    refuse_if(known(found) != count, lambda: PayloadError(f"a bitmap names {int(found)} rows; expected {count}"))
    return keys


@dataclass(frozen=True)
class Layout:
    """How runs of elements lie in the `regions` of a vector of `numel` elements, and how their indices travel.

    `runs` are the lengths of the runs. Each index is more than the one before it by `least`, at least; with None, they
    are in any order. Padding repeats an index, so a bitmap is for `of_rows` alone.
    """

    regions: Regions
    runs: tuple[int, ...]
    numel: int
    coding: int = NUMBERS
    least: int | None = None

    @classmethod
    @lru_cache(maxsize=1024)  # they stay the same from step to step
    def of(
        cls, regions: Regions, runs: tuple[int, ...], numel: int, *, ascending: bool, slotted: bool = False
    ) -> "Layout":
        """Return the layout with the shortest coding. Elements ascend in each region, or lie in slots."""
        if slotted:
            shorter = padded(slots.length(regions, runs)) < nbytes(NUMBERS, sum(runs), numel)
            return cls(regions, runs, numel, SLOTS if shorter else NUMBERS)
        if not (ascending and in_order(regions)):
            return cls(regions, runs, numel)
        return cls(regions, runs, numel, shortest(sum(runs), numel, (NUMBERS, ELIAS_FANO)), least=0)

    @classmethod
    @lru_cache(maxsize=1024)
    def of_rows(cls, count: int, space: int, coding: int | None = None) -> "Layout":
        """Return that of `count` of `space` rows, which ascend without repeats, in the shortest coding or this one."""
        coding = shortest(count, space, CODINGS) if coding is None else coding
        return cls(((0, space),), (count,), space, coding, least=1)

    @cached_property
    def count(self) -> int:
        """How many elements there are."""
        return sum(self.runs)

    @cached_property
    def length(self) -> int:
        """Bytes of the section that names the elements, without padding."""
        if self.coding == SLOTS:
            return slots.length(self.regions, self.runs)
        return length(self.coding, self.count, self.numel)

    @cached_property
    def nbytes(self) -> int:
        """The same, padding included."""
        return padded(self.length)

    def sections(self, elements: Tensor, seeds: Sequence[int] = ()) -> Sequence[Tensor | Section]:
        """Return what names `elements` (int32). On the host, raise PayloadError if they do not fit this layout.

        On a GPU the host would have to wait for them, and receivers check anyway.
        """
        if self.coding == SLOTS:
            return slots.sections(elements, self.regions, self.runs, seeds)
        if on_host(elements):
            checked(elements[None], (0, self.numel), self.least)
        if self.coding == NUMBERS:
            return [elements]
        if self.coding == ELIAS_FANO:
            return [Section(elements, space=self.numel)]
        bits = torch.zeros(self.numel, dtype=torch.uint8, device=elements.device)
        return [kernels.pack_bits(bits.index_fill_(0, elements.long(), 1), 1)]

    def read(self, rows: Tensor) -> Tensor:
        """Return the indices, int32 (ranks, count), that the sections of several ranks name: their padding was checked.

        Raises PayloadError if one is malformed or names an element outside the regions.
        """
        if self.coding == SLOTS:
            return slots.read(rows, self.regions, self.runs)
        count, space, edges, said = self.count, self.numel, self._bounds, None
        if self.coding == ELIAS_FANO:
            said = f"a section of {rows.shape[1]} bytes is not the Elias-Fano code of {count} numbers below {space}"
            if count and not self.least and not on_host(rows):
                keys, wrong = kernels.elias_fano_read(rows, count, space, constant(edges, torch.int32, rows.device))
                refuse_if(wrong, lambda: _malformed(self.decoded(rows), edges, space, said))
                return keys
        keys = self.decoded(rows)
        return checked(keys, edges, self.least, partial(_malformed, keys, edges, space, said))

    def decoded(self, rows: Tensor) -> Tensor:
        """Return the indices as they are: with a −1 if a code is not what its encoder writes."""
        if self.coding == ELIAS_FANO:
            return kernels.elias_fano_decode(rows, self.count, self.numel)
        if self.coding == BITMAP:
            return torch.stack([_bitmap(row, self.count) for row in rows])
        return rows[:, : 4 * self.count].contiguous().view(torch.int32).view(rows.shape[0], self.count)

    def by_region(self, keys: Tensor) -> tuple[Tensor, tuple[int, ...]]:
        """Return the order that groups `keys` by region, ascending in each, and how many fall in each region."""
        ascend = bool((keys[1:] >= keys[:-1]).all())
        ascending, order = (keys, torch.arange(keys.numel(), device=keys.device)) if ascend else keys.sort()
        edges = tuple(edge for offset, length in self.regions for edge in (offset, offset + length))
        bounds = torch.searchsorted(ascending, constant(edges, keys.dtype, keys.device).view(-1, 2)).tolist()
        return torch.cat([order[low:high] for low, high in bounds]), tuple(high - low for low, high in bounds)

    def padded(self, missing: int) -> tuple[int, tuple[int, ...]]:
        """Return the index for `missing` elements of padding (the last one of all regions), and the runs with them."""
        filled = [i for i, (_, length) in enumerate(self.regions) if length]
        last = filled[-1] if filled else len(self.regions) - 1
        place = max(0, len(self.runs) - len(self.regions) + last)
        runs = (*self.runs[:place], self.runs[place] + missing, *self.runs[place + 1 :])
        return max(0, sum(self.regions[last]) - 1), runs

    @cached_property
    def _bounds(self) -> tuple[int, ...]:
        return tuple(edge for offset, length in sorted(self.regions) for edge in (offset, offset + length))


@lru_cache(maxsize=1024)
def in_order(regions: Regions) -> bool:
    """Whether regions follow one another, so that indices that ascend in each region ascend overall."""
    ends = (offset + length for offset, length in regions)
    return all(end <= offset for end, (offset, _) in zip(ends, regions[1:], strict=False))

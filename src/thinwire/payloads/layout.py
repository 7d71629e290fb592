"""The layout of a sparse payload: where its elements lie, in which order, and how their indices travel."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial

import torch
from torch import Tensor

from thinwire.kernels.memory import constant
from thinwire.payloads import indices, slots
from thinwire.payloads.base import Regions
from thinwire.payloads.wire import ELIAS_FANO, NUMBERS, SLOTS, padded

CODINGS = (NUMBERS, ELIAS_FANO, SLOTS)


@dataclass(frozen=True)
class Layout:
    """How runs of elements lie in the `regions` of a vector of `numel` elements, and how their indices travel.

    `runs` are the lengths of the runs. With `ascends`, indices ascend from the first element to the last. Padding
    repeats an index, so a bitmap is not among the codings.
    """

    regions: Regions
    runs: tuple[int, ...]
    numel: int
    coding: int = NUMBERS
    ascends: bool = False

    @classmethod
    @lru_cache(maxsize=1024)  # they stay the same from step to step
    def of(
        cls, regions: Regions, runs: tuple[int, ...], numel: int, *, ascending: bool, slotted: bool = False
    ) -> "Layout":
        """Return the layout with the shortest coding. Elements ascend in each region, or lie in slots."""
        if slotted:
            return cls(regions, runs, numel, _shorter_in_slots(regions, runs, numel))
        if not (ascending and in_order(regions)):
            return cls(regions, runs, numel)
        return cls(regions, runs, numel, indices.shortest(sum(runs), numel, (NUMBERS, ELIAS_FANO)), ascends=True)

    @cached_property
    def count(self) -> int:
        """How many elements there are."""
        return sum(self.runs)

    @cached_property
    def length(self) -> int:
        """Bytes of the section that names the elements, without padding."""
        if self.coding == SLOTS:
            return slots.length(self.regions, self.runs)
        return indices.length(self.coding, self.count, self.numel)

    @cached_property
    def nbytes(self) -> int:
        """The same, padding included."""
        return padded(self.length)

    def section(self, elements: Tensor, seeds: Sequence[int]) -> Tensor:
        """Return the section that names `elements` (int32). Raises PayloadError if they do not fit this layout."""
        if self.coding == SLOTS:
            return slots.section(elements, self.regions, self.runs, seeds)
        return indices.section(self.coding, elements, self.numel, least=0 if self.ascends else None)

    def read(self, buffers: Tensor) -> Tensor:
        """Return the indices, int32 (ranks, count), that the buffers of several ranks name.

        Raises PayloadError if a buffer is malformed or names an element outside the regions.
        """
        if self.coding == SLOTS:
            found = slots.read(buffers, self.regions, self.runs)
            return indices.checked(found, self._bounds, None, partial(slots.no_index, found, self.regions, self.runs))
        least = 0 if self.ascends else None
        return indices.read(self.coding, buffers, self.count, self.numel, least=least, edges=self._bounds)

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


def _shorter_in_slots(regions: Regions, runs: tuple[int, ...], numel: int) -> int:
    return SLOTS if slots.nbytes(regions, runs) < indices.nbytes(NUMBERS, sum(runs), numel) else NUMBERS

"""The section that names single elements: in ascending, in slot or in any order."""

from typing import NamedTuple

from torch import Tensor

from thinwire.payloads import indices, slots, wire
from thinwire.payloads.base import Spans
from thinwire.payloads.wire import ELIAS_FANO, NUMBERS, SLOTS

CODINGS = (NUMBERS, ELIAS_FANO, SLOTS)


class Names(NamedTuple):
    """`runs` elements of `spans`, within `numel`, by a coding that follows from these and their order alone.

    Elements in ascending order may be named more than once, as padding is; therefore no bitmap.
    """

    coding: int
    spans: Spans
    runs: tuple[int, ...]
    numel: int

    @classmethod
    def ascending(cls, spans: Spans, runs: tuple[int, ...], numel: int) -> "Names":
        """Return what is shortest for elements in ascending order."""
        coding = indices.shortest(sum(runs), numel, (NUMBERS, ELIAS_FANO))
        return cls(coding, spans, runs, numel)

    @classmethod
    def in_slots(cls, spans: Spans, runs: tuple[int, ...], numel: int) -> "Names":
        """Return what is shortest for elements in slot order."""
        shorter = slots.nbytes(spans, runs) < indices.nbytes(NUMBERS, sum(runs), numel)
        return cls(SLOTS if shorter else NUMBERS, spans, runs, numel)

    @property
    def nbytes(self) -> int:
        """Length of the section, padding included."""
        if self.coding == SLOTS:
            return slots.nbytes(self.spans, self.runs)
        return indices.nbytes(self.coding, sum(self.runs), self.numel)

    def section(self, elements: Tensor, seeds: tuple[int, ...]) -> Tensor:
        """Return the section for `elements` (int32). Raises PayloadError where one is out of range or of its slot."""
        if self.coding == SLOTS:
            return slots.section(elements, self.spans, self.runs, seeds)
        return indices.section(self.coding, elements, self.numel)

    def read(self, rows: Tensor) -> Tensor:
        """Return the elements, int32 (ranks, count), that `rows` of several ranks name. Raises PayloadError."""
        wire.check_shape(rows, self.nbytes)
        if self.coding == SLOTS:
            return slots.read(rows, self.spans, self.runs)
        return indices.read(self.coding, rows, sum(self.runs), self.numel)

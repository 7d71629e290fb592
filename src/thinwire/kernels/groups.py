"""How a vector is divided: into runs, one after another, and each run into groups that share a scale."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from torch import Tensor

from thinwire.kernels.parts import Array

_PIECE = 1 << 18


@dataclass(frozen=True)
class Groups:
    """Each run begins a new group. A group has `size` elements, or fewer at a run's end; with None it is the run."""

    runs: tuple[int, ...]
    size: int | None = None

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """How many elements a group of each run has, but for its last one."""
        return tuple(self.size or max(1, run) for run in self.runs)

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """How many groups each run has."""
        return tuple(-(-run // width) for run, width in zip(self.runs, self.widths, strict=True))

    @lru_cache(maxsize=256)  # noqa: B019 - few are kept, and none holds a tensor
    def pieces(self, align: int = 0) -> Array:
        """Return what threads divide among themselves, int64 (n, 6).

        A run's number, its first element and group, and how wide its groups are; then the piece, from which of the
        run's elements to which. Only large runs are cut, at multiples of `align`, or of their width with 0.
        """
        rows, begin, first = [], 0, 0
        for number, (run, width, count) in enumerate(zip(self.runs, self.widths, self.counts, strict=True)):
            step = max(1, _PIECE // (align or width)) * (align or width)
            rows += [(number, begin, first, width, lo, min(run, lo + step)) for lo in range(0, run, step)]
            begin, first = begin + run, first + count
        return np.array(rows, np.int64).reshape(-1, 6)

    def parts(self, *vectors: Tensor, scales: Tensor | None = None) -> Iterator[tuple[Any, ...]]:
        """Return for each run its part of the vectors, its scales if there are any, and its width."""
        columns = [x.split(self.runs) for x in vectors] + ([] if scales is None else [scales.split(self.counts)])
        return zip(*columns, self.widths, strict=True)

"""How a vector is divided: into runs, one after another, and each run into groups that share a scale."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor


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

    def parts(self, *vectors: Tensor, scales: Tensor | None = None) -> Iterator[tuple[Any, ...]]:
        """Return for each run its part of the vectors, its scales if there are any, and its width."""
        if len(self.runs) == 1:
            whole = vectors if scales is None else (*vectors, scales)
            return iter([(*whole, self.widths[0])])
        columns = [x.split(self.runs) for x in vectors] + ([] if scales is None else [scales.split(self.counts)])
        return zip(*columns, self.widths, strict=True)

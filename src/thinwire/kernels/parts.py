"""Several vectors in one flat tensor: an object from which kernels read where each begins, and how it is divided."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, groupby, starmap
from typing import Any, NamedTuple, final, overload

import numpy as np
import torch
from torch import Tensor

from thinwire.kernels.ranges import is_single_threaded

Array = np.ndarray[Any, Any]
Ints = Sequence[int]
Vectors = Sequence[Tensor]
Regions = Sequence[tuple[int, int]]
"""The offset and the length of each."""
REALS: dict[torch.dtype, Any] = {torch.float32: np.float32, torch.float64: np.float64}
"""The types of numbers that loops are compiled for."""
_PIECE = 1 << 18
"""About how many elements of a run a thread takes at a time."""


class Found(NamedTuple):
    """Indices (int32) and values of one vector's picks after another's; and how many are not 0, 0-dim, if counted."""

    indices: Tensor
    values: Tensor
    carried: Tensor | None = None


class Fit(NamedTuple):
    """How values are written: in this dtype, and finite ones between ±`bound`, if there is one."""

    dtype: torch.dtype
    bound: float | None = None


@final
class Cut:
    """Where vectors lie in a flat tensor, in elements. What follows from that is worked out once."""

    def __init__(self, offsets: Sequence[int], lengths: Sequence[int]) -> None:
        self.offsets, self.lengths = tuple(offsets), tuple(lengths)
        self._slices: dict[tuple[int | None, int | None], Cut] = {}

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, some: slice) -> "Cut":
        """Return where some neighbours lie."""
        key = some.start, some.stop
        if key not in self._slices:
            whole = not some.start and (some.stop is None or some.stop >= len(self))
            self._slices[key] = self if whole else Cut(self.offsets[some], self.lengths[some])
        return self._slices[key]

    @cached_property
    def regions(self) -> tuple[tuple[int, int], ...]:
        """The offset and the length of each."""
        return tuple(zip(self.offsets, self.lengths, strict=True))

    @cached_property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """Where each begins and ends."""
        return tuple((offset, offset + length) for offset, length in self.regions)

    @cached_property
    def places(self) -> tuple[Array, Array]:
        """Offsets and lengths, int64."""
        return np.array(self.offsets, np.int64), np.array(self.lengths, np.int64)

    @cached_property
    def by_size(self) -> Sequence[tuple[slice, bool]]:
        """Neighbours, and whether they are small: then they are taken together, on a CPU by one thread each."""
        found, start = list[tuple[slice, bool]](), 0
        for small, group in groupby(map(is_single_threaded, self.lengths)):
            end = start + len(list(group))
            found.append((slice(start, end), small))
            start = end
        return found

    @cached_property
    def joined(self) -> "Cut":
        """What they cover, in order: those that lie side by side are one."""
        found: list[tuple[int, int]] = []
        for offset, length in sorted(self.regions):
            if found and sum(found[-1]) == offset:
                found[-1] = found[-1][0], found[-1][1] + length
            else:
                found.append((offset, length))
        return cut_at(tuple(found))

    @cached_property
    def _gapless(self) -> bool:
        return self.offsets == self.packed(1).offsets

    def fills(self, numel: int) -> bool:
        """Whether they are all of `numel` elements, one after another."""
        return self._gapless and self.end == numel

    def packed(self, multiple: int) -> "Cut":
        """Return the same vectors one after another, each from a multiple of so many elements on."""
        room = [-(-length // multiple) * multiple for length in self.lengths]
        return Cut([0, *accumulate(room[:-1])] if room else (), self.lengths)

    @cached_property
    def end(self) -> int:
        """Where the last vector ends."""
        return max((end for _, end in self.spans), default=0)


@lru_cache(maxsize=256)
def cut_at(regions: tuple[tuple[int, int], ...]) -> Cut:
    """Return the cut of regions, each an offset and a length."""
    return Cut([offset for offset, _ in regions], [length for _, length in regions])


@lru_cache(maxsize=1024)  # layouts stay the same from step to step
def cut_of_runs(runs: tuple[int, ...]) -> Cut:
    """Return the cut of vectors of these lengths, one after another."""
    return Cut([0] * len(runs), runs).packed(1)


@final
class Parts(Sequence[Tensor]):
    """The vectors at `cut` of a flat tensor. As a sequence, it holds views."""

    __slots__ = ("cut", "flat")

    def __init__(self, flat: Tensor, cut: Cut) -> None:
        self.flat, self.cut = flat, cut

    def __len__(self) -> int:
        return len(self.cut.lengths)

    def __iter__(self) -> Iterator[Tensor]:
        return map(self.flat.__getitem__, starmap(slice, self.cut.spans))

    @overload
    def __getitem__(self, index: int) -> Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> "Parts": ...
    def __getitem__(self, index: int | slice) -> "Tensor | Parts":
        """Return a view, or some neighbours."""
        if isinstance(index, slice):
            return Parts(self.flat, self.cut[index])
        start, end = self.cut.spans[index]
        return self.flat[start:end]


@dataclass(frozen=True)
class Groups:
    """A vector is divided into runs, one after another, and each run into groups that share a scale.

    A group has `size` elements, or fewer at a run's end; with None it is the run.
    """

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


def together(xs: Sequence[Tensor]) -> Parts:
    """Return vectors as those of one flat tensor; themselves if they are."""
    if isinstance(xs, Parts):
        return xs
    return Parts(torch.cat(list(xs)) if len(xs) > 1 else xs[0], cut_of_runs(tuple(x.numel() for x in xs)))


def cut_of(xs: Sequence[Tensor]) -> Cut:
    """Return how long vectors are, and where they lie if that is one flat tensor."""
    return xs.cut if isinstance(xs, Parts) else Cut([0] * len(xs), [x.numel() for x in xs])


def are_of(xs: Sequence[Tensor], dtype: torch.dtype) -> bool:
    """Whether all are of a dtype."""
    return xs.flat.dtype == dtype if isinstance(xs, Parts) else all(x.dtype == dtype for x in xs)


def whole(xs: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors, or the one that they fill without gaps."""
    return [xs.flat] if isinstance(xs, Parts) and xs.cut.fills(xs.flat.numel()) else list(xs)


def begins(xs: Sequence[Tensor]) -> Array:
    """Return where the tensors' elements begin, int64. Keep the tensors until the addresses are done with."""
    if isinstance(xs, Parts):
        return xs.flat.data_ptr() + xs.flat.element_size() * xs.cut.places[0]
    return np.array([x.data_ptr() for x in xs], np.int64)


def addresses(*columns: Sequence[Tensor]) -> Array:
    """Return `begins` of several columns of tensors, a row for each vector."""
    return np.stack(list(map(begins, columns)), axis=1)


def sizes(xs: Sequence[Tensor]) -> Array:
    """Return how many elements each has, int64."""
    return xs.cut.places[1] if isinstance(xs, Parts) else np.array([x.numel() for x in xs], np.int64)


def in_dtype(xs: Sequence[Tensor], dtype: torch.dtype) -> Sequence[Tensor]:
    """Return the vectors in a dtype, contiguous; themselves if they are."""
    if isinstance(xs, Parts):
        return xs if xs.flat.dtype == dtype else Parts(xs.flat.to(dtype), xs.cut)
    return [x if x.dtype == dtype and x.is_contiguous() else x.to(dtype).contiguous() for x in xs]


def gather(x: Tensor, indices: Tensor) -> Tensor:
    """Return the elements at indices (int32), and 0 for −1."""
    return x.index_select(0, indices.clamp(min=0)).masked_fill_(indices < 0, 0)


def wide(x: Tensor) -> Tensor:
    """Return a vector in float32 or wider, contiguous, as kernels take it."""
    return x.to(torch.promote_types(x.dtype, torch.float32)).contiguous()


def wide_each(xs: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return what `wide` does of each."""
    return in_dtype(xs, torch.promote_types(xs[0].dtype, torch.float32))

"""What a codec encodes: a tensor, or a sum that one pass can both compute and select from."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from copy import copy
from functools import partial
from typing import Any, Self, TypeVar, final

import torch
from torch import Tensor
from typing_extensions import override

from thinwire import kernels, waits
from thinwire.kernels import Chunking, Draw, Found, Picks, Sum, replay
from thinwire.kernels.parts import Cut, Fit, Ints, Parts, Regions, cut_of, whole, wide, wide_each
from thinwire.kernels.ranges import is_single_threaded

_T = TypeVar("_T")
_CAPTURED = 1 << 25
"""Up to so many elements a captured launch is worth more than kernels that know where their one vector begins."""


@final
class Note:
    """A codec's note about one parameter from an earlier step. The memory keeps it beside the residual."""

    def __init__(self, committed: Mapping[str, Tensor], staged: dict[str, Tensor], name: str) -> None:
        self._committed, self._staged, self._name = committed, staged, name

    def read(self) -> Tensor | None:
        """Return the latest note, from a committed step or an earlier part of this one; None if there is none."""
        return self._staged.get(self._name, self._committed.get(self._name))

    def write(self, note: Tensor) -> None:
        """Write a flat tensor in the vector's units: if the loss scale changes, the note is multiplied too."""
        self._staged[self._name] = note


class Signal(ABC):
    """A flat vector that may not have been computed yet.

    Values travel in `dtype`, the gradient's; the vector itself may be held in a wider one. `note` is None if the memory
    keeps no notes. `share` is the part of the wire's range that this rank may use: 1 / world size if a memory keeps
    what is clamped off a value. It is None if no memory does, because then an overflow must show. `computed` says
    whether the vector has been computed: until `tensor` or `select` is called, it may be unwritten memory.
    """

    computed: bool = False
    note: Note | None = None
    share: float | None = None

    shape: tuple[int, ...] = ()
    """The tensor's shape as it lies in memory, for codecs that see a matrix in it; () if it is not known."""

    dtype: torch.dtype
    numel: int
    device: torch.device

    @abstractmethod
    def tensor(self) -> Tensor:
        """Return the vector, computing it first if need be."""

    @abstractmethod
    def sample(self, offset: int, stride: int) -> Tensor:
        """Return every stride-th element from `offset` on, without computing the rest."""

    @abstractmethod
    def select(self, threshold: Tensor, capacity: int) -> Picks:
        """Pick where 0 < |x| ≥ threshold (0-dim) or x is NaN. If more than `capacity` qualify, pick the largest.

        Computes the vector in the same pass. Call it at most once.
        """

    def pick(self, draw: Draw) -> Found:
        """Pick with a threshold from a sample. Returns `draw.capacity` indices and values: see `Signals.pick`."""
        threshold = draw.threshold(self.sample, self.device)
        return draw.placed(limited(self.select(threshold, draw.room(self.numel)), draw.capacity))

    def peak(self) -> Tensor:
        """Compute the vector, and return its largest magnitude (1): NaN if any is, 0 without elements."""
        return self.select(torch.full((), torch.inf, dtype=torch.float32, device=self.device), 0).peak.view(1)


@final
class Plain(Signal):
    """A flat tensor, as it is. `dtype` is the gradient's dtype, if it differs from the tensor's."""

    def __init__(self, x: Tensor, dtype: torch.dtype | None = None) -> None:
        self._x, self.computed = x, True
        self.dtype, self.numel, self.device = dtype or x.dtype, x.numel(), x.device

    def tensor(self) -> Tensor:
        """Return the tensor."""
        return self._x

    def sample(self, offset: int, stride: int) -> Tensor:
        """Return every stride-th element."""
        return self._x[offset::stride]

    def select(self, threshold: Tensor, capacity: int) -> Picks:
        """Pick the elements that reach the threshold."""
        return kernels.select(self._x, threshold, capacity)


class Signals(Sequence[Signal]):
    """The vectors of a bucket, n ≥ 1, in order. What they need is done in one call for several of them.

    On a CPU small neighbours are taken together. On a GPU all are, as launches count; but a single large one is read
    faster by kernels that know where it begins. `share`, `shapes` and `lengths` are those of the signals.
    """

    dtype: torch.dtype
    device: torch.device
    wide: torch.dtype | None = None
    """That of sums."""
    _factors: tuple[Any, ...] = ()
    _there: bool = False
    """Whether they need not be computed."""

    def __init__(self, made: Sequence[Signal] = (), *columns: Sequence[Any]) -> None:
        self._made, self._columns = dict(enumerate(made)), columns
        self.cut = cut_of(columns[0]) if columns else Cut([0] * len(made), [signal.numel for signal in made])
        self.lengths: Sequence[int] = self.cut.lengths
        self._done = [False] * len(self.lengths)
        self.share: float | None = None
        self.shapes: Sequence[tuple[int, ...]] = [()] * len(self._done)
        if made:
            self.dtype, self.device = made[0].dtype, made[0].device
            self.share, self.shapes = made[0].share, [signal.shape for signal in made]

    def __len__(self) -> int:
        return len(self._done)

    def __getitem__(self, i: Any) -> Any:
        """Return one signal. Raises IndexError if there are fewer."""
        shape = self.shapes[i]
        if i not in self._made:
            self._made[i] = self._make(i)
        signal = self._made[i]
        signal.share, signal.shape = self.share, shape
        return signal

    @property
    def place(self) -> Hashable:
        """What computing them depends on, beside the numbers in memory; None if that cannot be said."""
        if any(signal.note is not None for signal in self._made.values()):  # read and written by the host
            return None
        columns = [_place(column) for column in self._columns]
        return None if None in columns or not columns else (type(self), self._factors, self.share, *columns)

    def again(self) -> Self:
        """Return these signals once more, as they were made."""
        other = copy(self)
        other._made, other._done = {}, [self._there] * len(self._done)
        return other

    def settle(self, other: "Signals") -> None:
        """Take it that these have been computed as the others have, which `again` returned."""
        self._done[:] = other._done

    @property
    def computed(self) -> bool:
        """Whether all have been computed."""
        return all(self._done) or all(signal.computed for signal in self)

    def tensors(self) -> Sequence[Tensor]:
        """Return the vectors, computing them first if need be."""
        found = self._found(self._tensors, None, range(len(self._done)))
        return found[0] if len(found) == 1 else [x for some in found for x in some]

    def multiples(self) -> tuple[Sequence[Tensor], float]:
        """Return vectors, and what the caller multiplies each by: then they count as computed."""
        return self.tensors(), 1.0

    def pick(self, draws: Sequence[Draw], fit: Fit | None = None) -> Found:
        """Pick from each, with a threshold from a sample, and compute it.

        Returns indices (int32) and values: as many as the first draw's capacity, then as many as the next one's. Where
        fewer are picked, the draw's `last` with value 0 follows. Sums' values are written as `fit` says if that costs
        nothing, here as in `slots` and `largest`: the caller narrows the others.
        """
        pick = partial(self._pick, fit=fit)
        return found_of(self._found(pick, lambda signal, draw: signal.pick(draw), draws, few=_CAPTURED))

    def slots(self, draws: Sequence[Draw], slots: Ints, seeds: Ints, regions: Regions, fit: Fit | None = None) -> Found:
        """Compute all, and return indices and values of picks, as `pick` finds them, in hashed slots."""
        indices, values, _ = self.pick(draws)
        runs = [draw.capacity for draw in replay.fixed(draws)]
        return kernels.hashed_slots_of_each(self.tensors(), indices, values, runs, slots, seeds, regions)

    def largest(self, counts: Sequence[int], firsts: Sequence[int], fit: Fit | None = None) -> Found:
        """Compute all, and return indices (int32) and values of the largest of each, as many as `counts` says.

        A vector's indices count from its number of `firsts` on.
        """
        return Found(*kernels.largest_of_each(wide_each(self.tensors()), counts, firsts))

    def chunk_topk(self, chunkings: Sequence[Chunking]) -> tuple[Tensor, Tensor]:
        """Return the largest coefficients of every chunk of each: positions and values, one after another's."""
        return joined(self._found(self._chunk_topk, None, chunkings))

    def peaks(self) -> Tensor:
        """Compute all, and return the largest magnitude of each (n): NaN if any is, 0 without elements."""
        found = self._found(self._peaks, lambda signal, _: signal.peak(), range(len(self._done)))
        return found[0] if len(found) == 1 else torch.cat(found)

    def _found(
        self,
        together: Callable[[slice, Any], _T],
        alone: Callable[[Signal, Any], _T] | None,
        arguments: Sequence[Any],
        few: int = 0,
    ) -> list[_T]:
        """Return what is found of neighbours that are taken together, and of each other one (by `alone`, if given).

        On a GPU a single vector goes the way of several if it has a few elements only.
        """
        found, count, first = [], len(self._done), self.lengths[0]
        whole = slice(0, count), count > 1 or is_single_threaded(first) or first <= few
        for some, small in self.cut.by_size if self.device.type in waits.HOST else [whole]:
            if small:
                found.append(together(some, arguments if some.stop - some.start == count else arguments[some]))
            elif alone is None:
                found += [together(slice(i, i + 1), arguments[i : i + 1]) for i in numbers(some)]
            else:
                found += [alone(self[i], arguments[i]) for i in numbers(some)]
        return found

    def _make(self, i: int) -> Signal:
        """Return one signal of those that are described by columns."""
        raise NotImplementedError

    def _tensors(self, some: slice, _: object = None) -> Sequence[Tensor]:
        return [self[i].tensor() for i in numbers(some)]

    def _pick(self, some: slice, draws: Sequence[Draw], fit: Fit | None) -> Found:
        return found_of([self[i].pick(draw) for i, draw in zip(numbers(some), draws, strict=True)])

    def _chunk_topk(self, some: slice, chunkings: Sequence[Chunking]) -> tuple[Tensor, Tensor]:
        return kernels.chunk_topk(wide_each(self._tensors(some)), chunkings)

    def _peaks(self, some: slice, _: object) -> Tensor:
        return kernels.peak_of_each(self._tensors(some))


@final
class Plains(Signals):
    """Flat tensors, as they are; or times a factor, in place."""

    def __init__(self, xs: Sequence[Tensor], factor: float = 1.0) -> None:
        super().__init__((), xs)
        self._factors, self._there = (factor,), factor == 1
        self._done = [self._there] * len(xs)
        self.dtype, self.device = xs[0].dtype, xs[0].device

    @override
    def tensors(self) -> Sequence[Tensor]:
        xs, factor = self.multiples()
        if factor != 1:
            torch._foreach_mul_(whole(xs), factor)
        return xs

    @override
    def multiples(self) -> tuple[Sequence[Tensor], float]:
        factor = 1.0 if all(self._done) else self._factors[0]
        self._done = [True] * len(self._done)
        return self._columns[0], factor

    def _make(self, i: int) -> Signal:
        return Plain(self.tensors()[i])

    def _tensors(self, some: slice, _: object = None) -> Sequence[Tensor]:
        return self.tensors()[some]


@final
class Summed(Signal):
    """The sum of one vector, the i-th of those of which `done` says whether they have been computed."""

    def __init__(self, sums: Sum, done: list[bool], i: int) -> None:
        self._sums, self._done, self._i, like = sums, done, i, sums.gradients[0]
        self.dtype, self.numel, self.device = like.dtype, like.numel(), like.device

    @property
    def computed(self) -> bool:
        """Whether it has been computed, alone or with others."""
        return self._done[self._i]

    @computed.setter
    def computed(self, now: bool) -> None:
        self._done[self._i] = now

    def tensor(self) -> Tensor:
        """Return the sum."""
        if not self.computed:
            self.computed = True
            kernels.accumulate(self._sums)
        return self._sums.outs[0]

    def sample(self, offset: int, stride: int) -> Tensor:
        """Return every stride-th element, before it is rounded if it is."""
        return self._sums.sample(offset, stride)

    def select(self, threshold: Tensor, capacity: int) -> Picks:
        """Pick the elements that reach the threshold."""
        self.computed = True
        return kernels.accumulate_select(self._sums, threshold, capacity)


@final
class SummedEach(Signals):
    """The sums of several vectors."""

    def __init__(self, sums: Sum) -> None:
        columns: tuple[Sequence[Any], ...] = sums.outs, sums.residuals, sums.gradients, sums.scales
        if sums.decays is not None:
            columns += (sums.decays,)
        if sums.moving is not None and sums.velocities is not None:
            columns += (sums.moving, sums.velocities)
        super().__init__((), *columns)
        self._sums, self._factors, like = sums, (sums.momentum, sums.nesterov), sums.gradients[0]
        self.dtype, self.wide, self.device = like.dtype, sums.dtype, like.device

    @property
    def place(self) -> Hashable:
        """The same as of others; seeds change with the step."""
        return None if self._sums.how == "rounded" else super().place

    @override
    def slots(self, draws: Sequence[Draw], slots: Ints, seeds: Ints, regions: Regions, fit: Fit | None = None) -> Found:
        if self._apart:
            return super().slots(draws, slots, seeds, regions)
        return kernels.accumulate_hashed_slots(self._taken(slice(0, len(self))), draws, slots, seeds, regions, fit)

    @override
    def largest(self, counts: Sequence[int], firsts: Sequence[int], fit: Fit | None = None) -> Found:
        if self._apart:
            return super().largest(counts, firsts)
        return kernels.accumulate_largest_of_each(self._taken(slice(0, len(self))), counts, firsts, fit)

    @property
    def _apart(self) -> bool:
        """Whether sums are not to be made by what picks from all of them: on a GPU they are, as a rule."""
        alone = len(self.lengths) == 1 and self.lengths[0] > _CAPTURED
        return self.device.type in waits.HOST or self._sums.how == "rounded" or alone or any(self._done)

    def _make(self, i: int) -> Signal:
        return Summed(self._sums.one(i), self._done, i)

    def _tensors(self, some: slice, _: object = None) -> Sequence[Tensor]:
        if not any(self._done[some]):
            kernels.accumulate(self._taken(some))
        elif not all(self._done[some]):
            return super()._tensors(some)
        return self._sums[some].outs

    def _pick(self, some: slice, draws: Sequence[Draw], fit: Fit | None) -> Found:
        return kernels.accumulate_sampled_select(self._taken(some), draws, fit)

    def _chunk_topk(self, some: slice, chunkings: Sequence[Chunking]) -> tuple[Tensor, Tensor]:
        if any(self._done[some]):
            return super()._chunk_topk(some, chunkings)
        return kernels.accumulate_chunk_topk(self._taken(some), chunkings)

    def _taken(self, some: slice) -> Sum:
        """Return the sums of these, and note that they are computed."""
        self._done[some] = [True] * (some.stop - some.start)
        return self._sums[some]


def _place(column: Sequence[Any]) -> Hashable:
    if isinstance(column, Parts):
        return column.flat.data_ptr(), column.flat.dtype, column.cut
    return tuple(column) if all(isinstance(x, float | int) for x in column) else None


def numbers(some: slice) -> range:
    """Return the numbers in a slice that has both ends."""
    return range(some.start, some.stop)


def limited(picks: Picks, count: int) -> tuple[Tensor, Tensor]:
    """Return indices and values of `count` elements: the largest of the picks, then −1 with value 0."""
    return kernels.limited(picks, count, kernels.largest)


def largest(x: Tensor, k: int) -> Tensor:
    """Return the indices (int32, ascending) of the k largest magnitudes. NaN counts as largest."""
    return kernels.largest(wide(x), min(k, x.numel()))


def found_of(found: Sequence[Found]) -> Found:
    """Return what was found of several vectors; the caller counts what is not 0, if one kernel has not counted all."""
    return found[0] if len(found) == 1 else Found(*joined([each[:2] for each in found]))


def joined(found: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return indices and values of several, one after another."""
    indices, values = zip(*found, strict=True)
    return (indices[0], values[0]) if len(found) == 1 else (torch.cat(indices), torch.cat(values))

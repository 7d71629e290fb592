"""What a codec encodes: a tensor, or a sum that one pass can both compute and select from."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import groupby
from typing import Protocol, Self, final

import torch
from torch import Tensor
from torch.nn.functional import pad

from thinwire import kernels, waits
from thinwire.kernels import Chunking, Draw, Picks
from thinwire.kernels.ranges import is_alone


class Note(Protocol):
    """A codec's note about one parameter from an earlier step. The memory keeps it beside the residual."""

    def read(self) -> Tensor | None:
        """Return the latest note, from a committed step or an earlier part of this one; None if there is none."""

    def write(self, note: Tensor) -> None:
        """Write a flat tensor in the vector's units: if the loss scale changes, the note is multiplied too."""


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

    def pick(self, draw: Draw) -> tuple[Tensor, Tensor]:
        """Pick with a threshold from a sample. Returns `draw.capacity` indices and values: see `limited`."""
        threshold = draw.threshold(self.sample, self.device)
        return limited(self.select(threshold, draw.room(self.numel)), draw.capacity)

    @classmethod
    def compute_each(cls, signals: Sequence[Self]) -> list[Tensor]:
        """Return the vectors of several signals of this kind, on a CPU small ones."""
        return [signal.tensor() for signal in signals]

    @classmethod
    def pick_each(cls, signals: Sequence[Self], draws: Sequence[Draw]) -> tuple[Tensor, Tensor]:
        """Pick from each of several signals of this kind, on a CPU small ones."""
        return joined([signal.pick(draw) for signal, draw in zip(signals, draws, strict=True)])

    def chunk_topk(self, chunking: Chunking) -> tuple[Tensor, Tensor]:
        """Return the largest coefficients of every chunk, in float32 or wider: see `kernels.chunk_topk`."""
        return kernels.chunk_topk(wide(self.tensor()), chunking)

    @classmethod
    def chunk_topk_each(cls, signals: Sequence[Self], chunkings: Sequence[Chunking]) -> tuple[Tensor, Tensor]:
        """Return the same of several signals of this kind, on a CPU small ones."""
        return kernels.chunk_topk_each(wide_each(cls.compute_each(signals)), chunkings)


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


def picked(signals: Sequence[Signal], draws: Sequence[Draw]) -> tuple[Tensor, Tensor]:
    """Pick from each of n ≥ 1 signals. Those side by side are taken together, in one call; on a CPU, small ones are.

    Returns indices (int32), which count from each signal's first element, and values: as many as the first draw's
    capacity, then as many as the next one's. Where fewer are picked, −1 with value 0 follows.
    """
    return joined([kind.pick_each(signals[some], draws[some]) for kind, some in _companies(signals)])


def chunked(signals: Sequence[Signal], chunkings: Sequence[Chunking]) -> tuple[Tensor, Tensor]:
    """Return the largest coefficients of every chunk of n ≥ 1 signals: positions and values, one after another's."""
    found = []
    for kind, some in _companies(signals):
        if kind is Signal:
            found += [signal.chunk_topk(cut) for signal, cut in zip(signals[some], chunkings[some], strict=True)]
        else:
            found.append(kind.chunk_topk_each(signals[some], chunkings[some]))
    return joined(found)


def computed(signals: Sequence[Signal]) -> list[Tensor]:
    """Return the vectors of n ≥ 1 signals: see `_companies`."""
    return [x for kind, some in _companies(signals) for x in kind.compute_each(signals[some])]


def peaks(signals: Sequence[Signal]) -> Tensor:
    """Compute n ≥ 1 signals, and return the largest magnitude of each (n): NaN if any is, 0 without elements.

    Call it at most once, before anything else.
    """
    found = []
    for kind, some in _companies(signals):
        if kind is Signal:
            never = torch.full((), torch.inf, device=signals[0].device)
            found += [signal.select(never, 0).peak.view(1) for signal in signals[some]]
        else:
            found.append(kernels.peak_of_each(kind.compute_each(signals[some])))
    return found[0] if len(found) == 1 else torch.cat(found)


def _companies(signals: Sequence[Signal]) -> list[tuple[type[Signal], slice]]:
    """Return which neighbours are taken together, and by which class; `Signal` itself takes them one by one.

    On a CPU small ones are taken together. On a GPU all are, as launches count; but one that is large and has no
    neighbour is read faster by kernels that know where it begins.
    """
    on_gpu = signals[0].device.type not in waits.HOST
    found, start = list[tuple[type[Signal], slice]](), 0
    for (kind, together), group in groupby([(type(s), on_gpu or is_alone(s.numel)) for s in signals]):
        end = start + len(list(group))
        together = together and (end > start + 1 or is_alone(signals[start].numel))
        found.append((kind if together else Signal, slice(start, end)))
        start = end
    return found


def limited(picks: Picks, count: int) -> tuple[Tensor, Tensor]:
    """Return indices and values of `count` elements: the largest of the picks, then −1 with value 0."""
    indices, values, _ = picks
    if indices.numel() > count:
        best = largest(values, count)
        indices, values = indices.index_select(0, best), values.index_select(0, best)
    missing = count - indices.numel()
    if not missing:
        return indices, values
    return pad(indices, (0, missing), value=-1), pad(values, (0, missing))


def largest(x: Tensor, k: int) -> Tensor:
    """Return the indices (int32, ascending) of the k largest magnitudes. NaN counts as largest."""
    return kernels.largest(wide(x), min(k, x.numel()))


def wide(x: Tensor) -> Tensor:
    """Return a vector in float32 or wider, contiguous, as kernels take it."""
    return x.to(torch.promote_types(x.dtype, torch.float32)).contiguous()


def wide_each(xs: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return what `wide` does of each."""
    ready = all(x.dtype.itemsize >= 4 and x.is_contiguous() for x in xs)
    return xs if ready else [wide(x) for x in xs]


def joined(found: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return indices and values of several, one after another."""
    indices, values = zip(*found, strict=True)
    return (indices[0], values[0]) if len(found) == 1 else (torch.cat(indices), torch.cat(values))

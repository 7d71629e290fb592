"""What a codec encodes: a tensor, or a sum that one pass can both compute and select from."""

from abc import ABC, abstractmethod
from typing import Protocol, final

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.kernels import Chunking, Picks


class Note(Protocol):
    """A codec's note about one parameter from an earlier step. The memory keeps it beside what waits."""

    def read(self) -> Tensor | None:
        """Return the latest note, from a committed step or an earlier part of this one; None if there is none."""

    def write(self, note: Tensor) -> None:
        """Write a flat tensor in the vector's units: if the loss scale changes, the note is multiplied too."""


class Signal(ABC):
    """A flat vector that may not have been computed yet.

    Values travel in `dtype`, the gradient's; the vector itself may be held in a wider one. `note` is None if the
    memory keeps no notes. `share` is the part of the wire's range that this rank may use: 1 / world size if a memory
    keeps whatever is cut off a value. It is None if no memory does, because then an overflow must show. `computed` says
    whether the vector has been computed: until `tensor` or `select` is called, it may be unwritten memory.
    """

    computed: bool = False
    note: Note | None = None
    share: float | None = None

    dtype: torch.dtype
    numel: int
    device: torch.device
    _shape: tuple[int, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's shape as it lies in memory, for codecs that see a matrix in it; (numel,) unless it was set."""
        return self._shape or (self.numel,)

    @shape.setter
    def shape(self, shape: tuple[int, ...]) -> None:
        self._shape = shape

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

    def chunk_topk(self, chunking: Chunking) -> tuple[Tensor, Tensor]:
        """Return the largest coefficients of every chunk, in float32 or wider: see `kernels.chunk_topk`."""
        x = self.tensor()
        x = x.to(torch.promote_types(x.dtype, torch.float32)).contiguous()
        return kernels.chunk_topk(x, chunking)


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

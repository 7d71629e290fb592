"""What a codec encodes: a tensor, or a sum that one pass will both take and select from."""

from abc import ABC, abstractmethod
from typing import Protocol, final

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.kernels import Picks


class Note(Protocol):
    """What a codec wrote about a parameter at an earlier step, kept by the memory along with what waits."""

    def read(self) -> Tensor | None:
        """Return what was written last, by a step that was kept or by an earlier part of this one."""

    def write(self, note: Tensor) -> None:
        """Write a flat tensor in units of the vector: a change of the loss scale multiplies it."""


class Signal(ABC):
    """A flat vector that may not have been computed yet.

    `dtype` is the gradient's, in which values travel; the vector itself may be held in a wider one. `note` is None
    where the memory keeps none. `share` is how much of the wire's range this rank may use, 1 over the number of ranks,
    where a memory keeps the rest of a value that is cut; None where nothing does, and an overflow is to be seen.
    `computed` says whether the vector is there: until `tensor` or `select` was called, it may be unwritten memory.
    """

    computed: bool = False
    note: Note | None = None
    share: float | None = None

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
        """Return where 0 < |x| ≥ threshold (0-dim) or x is NaN; of more than `capacity`, the largest.

        Computes the vector in the same pass. Call it at most once.
        """


@final
class Plain(Signal):
    """A flat tensor as it is; `dtype` is its gradient's, where that is another."""

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
        """Return what reaches the threshold."""
        return kernels.select(self._x, threshold, capacity)

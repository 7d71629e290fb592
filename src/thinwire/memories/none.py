"""Nothing waits."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import ClassVar, final

from torch import Tensor

from thinwire.memories.base import Memory, State
from thinwire.payloads import Payload
from thinwire.signals import Plain, Signal


@final
@dataclass(kw_only=True)
class NoMemory(Memory):
    """What a codec drops is lost."""

    stateful: ClassVar[bool] = False
    fields: ClassVar[frozenset[str]] = frozenset()

    def compensate(self, name: str, gradient: Tensor, scale: float, *, seed: int = 0) -> Signal:
        """Scale the gradient in place, as DDP does."""
        return Plain(gradient if scale == 1 else gradient.mul_(scale))

    def retain(self, name: str, delivered: Payload) -> None:
        """Do nothing."""

    def commit(self, names: Collection[str] | None = None) -> None:
        """Do nothing."""

    def rollback(self, names: Collection[str] | None = None) -> None:
        """Do nothing."""

    def rescale(self, factor: float) -> None:
        """Do nothing."""

    def state(self) -> State:
        """Return nothing."""
        return {}

    def restore(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Do nothing."""

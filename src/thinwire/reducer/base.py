"""The one small interface above memory, codec and exchange."""

import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import final

from torch import Tensor
from torch.futures import Future

from thinwire.exchanges.compat import Group
from thinwire.memories import Memory


@final
@dataclass(frozen=True, kw_only=True)
class Slot:
    """Where parameter `name` lies in a bucket: `length` elements from `offset` on."""

    name: str
    offset: int
    length: int


@final
@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Gradients of several parameters in one flat tensor, and those of its slots that concern the reader."""

    flat: Tensor
    slots: tuple[Slot, ...]

    def views(self) -> list[Tensor]:
        """Return the gradient of each slot, as a view."""
        return [self.flat[slot.offset : slot.offset + slot.length] for slot in self.slots]

    def only(self, slots: Iterable[Slot]) -> "Bucket":
        """Return the same bucket with some of its slots."""
        return replace(self, slots=tuple(slots))

    def coalesced(self) -> "Bucket":
        """Join slots that lie side by side. Their names no longer mean a parameter."""
        joined: list[Slot] = []
        for slot in sorted(self.slots, key=lambda slot: slot.offset):
            if joined and joined[-1].offset + joined[-1].length == slot.offset:
                joined[-1] = replace(joined[-1], length=joined[-1].length + slot.length)
            else:
                joined.append(slot)
        return self.only(joined)


@final
@dataclass(frozen=True, kw_only=True)
class Round:
    """What a reducer needs to know of the step: its number (from 0), the group, and the factor that makes sums means.

    `idle` parameters have no gradient this step: nothing is sent for them and their memory rests. With `watch`,
    results say whether they are finite.
    """

    step: int
    group: Group
    scale: float
    idle: frozenset[str] = frozenset()
    watch: bool = True

    def seed(self, name: str) -> int:
        """Return 32 bits that depend on step and name alone: alike on all ranks, new every step."""
        return zlib.crc32(f"{self.step}/{name}".encode())


class Reducer(ABC):
    """Turns the gradients of a bucket into their mean over all ranks, in place, bit-identical everywhere.

    `reduce` starts its collectives before it returns and in an order that depends on nothing but its arguments.
    """

    @abstractmethod
    def reduce(self, bucket: Bucket, at: Round) -> "Future[bool]":
        """Start; the future says, when the bucket holds the mean, whether it is finite (True if not watched)."""

    @abstractmethod
    def memories(self) -> Sequence[Memory]:
        """Return every memory in use, each once."""

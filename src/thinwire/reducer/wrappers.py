"""Reducers made of reducers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from torch import Tensor
from torch.futures import Future

from thinwire.collectives import Group
from thinwire.memories import Memory
from thinwire.reducer.base import Bucket, Reducer, Round, Slot
from thinwire.reducer.futures import all_true


@final
@dataclass(frozen=True, kw_only=True)
class WarmUp(Reducer):
    """Use `first` for `steps` steps, then `then`. Let both hold the same memory object if it is to carry over."""

    steps: int
    first: Reducer
    then: Reducer

    def prepare(self, group: Group, samples: Sequence[Tensor] = ()) -> None:
        """Prepare both."""
        self.first.prepare(group, samples)
        self.then.prepare(group, samples)

    def reduce(self, bucket: Bucket, at: Round) -> "Future[bool]":
        """Hand over to whichever is due."""
        return self._due(at).reduce(bucket, at)

    def reduce_rows(self, gradient: Tensor, name: str, at: Round) -> "Future[Tensor]":
        """Hand over to whichever is due."""
        return self._due(at).reduce_rows(gradient, name, at)

    def memories(self) -> Sequence[Memory]:
        """Return those of both."""
        return _distinct(self.first, self.then)

    def memory_of(self, slot: Slot) -> Memory:
        """Return what `then` says."""
        return self.then.memory_of(slot)

    def _due(self, at: Round) -> Reducer:
        return self.first if at.step < self.steps else self.then


@final
@dataclass(frozen=True, kw_only=True)
class MinimumSize(Reducer):
    """Use `large` for tensors of at least `numel` elements, `small` for others: two collectives per bucket at most."""

    numel: int
    small: Reducer
    large: Reducer

    def prepare(self, group: Group, samples: Sequence[Tensor] = ()) -> None:
        """Prepare both."""
        self.small.prepare(group, samples)
        self.large.prepare(group, samples)

    def reduce(self, bucket: Bucket, at: Round) -> "Future[bool]":
        """Give each its share of the slots."""
        large = bucket.only(slot for slot in bucket.slots if slot.length >= self.numel)
        small = bucket.only(slot for slot in bucket.slots if slot.length < self.numel)
        return all_true([self.large.reduce(large, at), self.small.reduce(small, at)])

    def reduce_rows(self, gradient: Tensor, name: str, at: Round) -> "Future[Tensor]":
        """Hand over to `large`."""
        return self.large.reduce_rows(gradient, name, at)

    def memories(self) -> Sequence[Memory]:
        """Return those of both."""
        return _distinct(self.small, self.large)

    def memory_of(self, slot: Slot) -> Memory:
        """Return what the one says that is due for this size."""
        return (self.large if slot.length >= self.numel else self.small).memory_of(slot)


def _distinct(*reducers: Reducer) -> Sequence[Memory]:
    return tuple({id(memory): memory for reducer in reducers for memory in reducer.memories()}.values())

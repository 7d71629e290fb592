"""Reducers made of reducers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

from torch import Tensor
from torch.futures import Future

from thinwire.checked import Size, checked
from thinwire.codecs import Identity
from thinwire.collectives import Group
from thinwire.exchanges import AllReduce
from thinwire.memories import Memory, NoMemory
from thinwire.reducer.base import Bucket, Mean, Reducer, Round, Segment, joined
from thinwire.reducer.compressed import Compressed


@final
@checked
@dataclass(frozen=True, kw_only=True)
class WarmUp(Reducer):
    """Use `first` for `steps` steps, then `then`. To carry the memory over, give both the same memory object."""

    steps: Size
    first: Reducer
    then: Reducer

    def prepare(self, group: Group, samples: Sequence[Tensor] = ()) -> None:
        """Prepare both."""
        self.first.prepare(group, samples)
        self.then.prepare(group, samples)

    def reduce(self, bucket: Bucket, at: Round) -> "Future[Mean]":
        """Hand over to whichever is due."""
        return self._due(at).reduce(bucket, at)

    def reduce_rows(self, gradient: Tensor, name: str, at: Round) -> "Future[Tensor]":
        """Hand over to whichever is due."""
        return self._due(at).reduce_rows(gradient, name, at)

    def memories(self) -> Sequence[Memory]:
        """Return the memories of both."""
        return _distinct(self.first, self.then)

    def memory_of(self, segment: Segment) -> Memory:
        """Return the memory of `then`."""
        return self.then.memory_of(segment)

    def _due(self, at: Round) -> Reducer:
        return self.first if at.step < self.steps else self.then


@final
@checked
@dataclass(frozen=True, kw_only=True)
class MinimumSize(Reducer):
    """Use `large` from `minimum_size` elements on, and `small` below. At most two collectives per bucket."""

    minimum_size: Size
    small: Reducer
    large: Reducer

    def prepare(self, group: Group, samples: Sequence[Tensor] = ()) -> None:
        """Prepare both."""
        self.small.prepare(group, samples)
        self.large.prepare(group, samples)

    def reduce(self, bucket: Bucket, at: Round) -> "Future[Mean]":
        """Give each its share of the segments."""
        large = bucket.only(segment for segment in bucket.segments if segment.length >= self.minimum_size)
        small = bucket.only(segment for segment in bucket.segments if segment.length < self.minimum_size)
        return joined([self.large.reduce(large, at), self.small.reduce(small, at)], bucket.flat)

    def reduce_rows(self, gradient: Tensor, name: str, at: Round) -> "Future[Tensor]":
        """Hand over to `large`."""
        return self.large.reduce_rows(gradient, name, at)

    def memories(self) -> Sequence[Memory]:
        """Return the memories of both."""
        return _distinct(self.small, self.large)

    def memory_of(self, segment: Segment) -> Memory:
        """Return the memory of the reducer for this size."""
        return (self.large if segment.length >= self.minimum_size else self.small).memory_of(segment)


@final
@checked
@dataclass(frozen=True, kw_only=True)
class PerTensor(Reducer):
    """Use the one of `reducers` that `chosen` names for a parameter, and `otherwise` for all other parameters.

    A bucket takes one exchange for each reducer in use, `otherwise` last. Raises ValueError for a name without reducer.
    """

    reducers: Mapping[str, Reducer]
    chosen: Mapping[str, str]
    otherwise: Reducer

    def __post_init__(self) -> None:
        if unknown := sorted(set(self.chosen.values()) - self.reducers.keys()):
            raise ValueError(f"chosen names {unknown[0]!r}; expected one of {', '.join(self.reducers)}")

    def prepare(self, group: Group, samples: Sequence[Tensor] = ()) -> None:
        """Prepare those in use."""
        for reducer in self._in_use():
            reducer.prepare(group, samples)

    def reduce(self, bucket: Bucket, at: Round) -> "Future[Mean]":
        """Give each its share of the segments."""
        futures = []
        for name, reducer in self.reducers.items():
            mine = [segment for segment in bucket.segments if self.chosen.get(segment.name) == name]
            if mine:
                futures.append(reducer.reduce(bucket.only(mine), at))
        rest = [segment for segment in bucket.segments if segment.name not in self.chosen]
        if rest or not futures:
            futures.append(self.otherwise.reduce(bucket.only(rest), at))
        return joined(futures, bucket.flat)

    def reduce_rows(self, gradient: Tensor, name: str, at: Round) -> "Future[Tensor]":
        """Hand over to `otherwise`."""
        return self.otherwise.reduce_rows(gradient, name, at)

    def of(self, name: str) -> Reducer:
        """Return the reducer of a parameter."""
        return self.reducers[self.chosen[name]] if name in self.chosen else self.otherwise

    def memories(self) -> Sequence[Memory]:
        """Return the memories of all reducers in use."""
        return _distinct(*self._in_use())

    def memory_of(self, segment: Segment) -> Memory:
        """Return the memory of the parameter's reducer."""
        return self.of(segment.name).memory_of(segment)

    def _in_use(self) -> list[Reducer]:
        used = set(self.chosen.values())
        return [*(reducer for name, reducer in self.reducers.items() if name in used), self.otherwise]


@final
@checked
@dataclass(frozen=True, kw_only=True)
class Released(Reducer):
    """Send gradients as they are, plus what waits in those of another reducer's memories that release it."""

    waiting: tuple[Memory, ...]
    dense: Reducer = field(
        default_factory=lambda: Compressed(memory=NoMemory(), codec=Identity(), exchange=AllReduce())
    )

    def reduce(self, bucket: Bucket, at: Round) -> "Future[Mean]":
        """Add what waits, and start."""
        releasing = [part for memory in self.waiting for part in memory.parts if part.releases]
        for segment, gradient in zip(bucket.segments, bucket.views(), strict=True):
            for memory in releasing:
                if memory.waits(segment.name):
                    memory.release(segment.name, gradient, at.scale)
        return self.dense.reduce(bucket, at)

    def memories(self) -> Sequence[Memory]:
        """Return the memories in which something may wait."""
        return self.waiting

    def memory_of(self, segment: Segment) -> Memory:
        """Return the memory that goes out with the next gradient; if there is none, that of `dense`."""
        return next(iter(self.holding(segment)), self.dense.memory_of(segment))

    def holding(self, segment: Segment) -> Sequence[Memory]:
        """Return the memories that go out with the next gradient."""
        return [memory for memory in self.waiting if any(part.releases for part in memory.parts)]


def _distinct(*reducers: Reducer) -> Sequence[Memory]:
    return tuple({id(memory): memory for reducer in reducers for memory in reducer.memories()}.values())

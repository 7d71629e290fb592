"""Recipes made of recipes. They say which one takes a gradient; that one does the work."""

import math
import sys
from abc import abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, cast, final

import torch
from torch import Tensor
from torch.futures import Future
from typing_extensions import override

from thinwire import trace
from thinwire.checked import Size, checked
from thinwire.codecs import Identity
from thinwire.collectives import Group
from thinwire.exchanges import AllReduce, Exchange, Exchanged
from thinwire.memories import Memory, NoMemory
from thinwire.payloads import Blocks, Keyed
from thinwire.reducer.base import Bucket, Mean, Reducer, Round, Segment, Segments, joined, note_rows
from thinwire.reducer.compressed import Compressed

_TABLE = Segment(name="", offset=0, length=sys.maxsize)
"""Stands for the table of a sparse embedding: large, and with no name of its own in a plan."""


def _uncompressed() -> Reducer:
    return Compressed(memory=NoMemory(), codec=Identity(), exchange=AllReduce())


class Routing(Reducer):
    """Gives each segment to one of its `children`; a bucket takes one exchange for each in use."""

    @abstractmethod
    def children(self) -> Sequence[Reducer]:
        """Return the recipes within, in the order in which their exchanges start."""

    @abstractmethod
    def child_of(self, segment: Segment, step: float) -> Reducer:
        """Return the child that takes a segment at a step."""

    @override
    def rebuilt(self, change: Callable[[Reducer], Reducer]) -> Reducer:
        recipes = {name: each.rebuilt(change) for name, each in vars(self).items() if isinstance(each, Reducer)}
        return replace(cast(Any, self), **recipes)

    def turn(self, step: int) -> Hashable:
        """Return what is the same for as long as `child_of` is."""
        return None

    @property
    @override
    def changes(self) -> bool:
        return any(child.changes for child in self.children())

    @property
    @override
    def chosen_for(self) -> Set[str]:
        return frozenset[str]().union(*(child.chosen_for for child in self.children()))

    @override
    def route(self, segment: Segment, step: float = math.inf) -> Reducer:
        return self.child_of(segment, step).route(segment, step)

    @override
    def prepare(self, group: Group, samples: Sequence[Tensor] = ()) -> None:
        for child in self.children():
            child.prepare(group, samples)

    @override
    def begin(self, at: Round) -> None:
        for child in self._deciding:
            child.begin(at)

    @cached_property
    def _deciding(self) -> Sequence[Reducer]:
        """Those that have something to decide when a reduction begins."""
        return [child for child in self.children() if type(child).begin is not Reducer.begin]

    def reduce(self, bucket: Bucket, at: Round) -> "Future[Mean]":
        """Give each child its share of the segments."""
        turn = self.turn(at.step)
        found: dict[Hashable, list[tuple[Reducer, Segments]]] = bucket.segments.once(self, "divided", dict)
        if turn not in found:
            found.clear()  # what was captured of an earlier turn goes with it
            found[turn] = self._divided(bucket.segments, at.step)
        parts = [child.reduce(Bucket(flat=bucket.flat, segments=mine), at) for child, mine in found[turn]]
        return joined(parts, bucket.flat)

    @override
    def reduce_rows(self, gradient: Tensor, name: str, at: Round) -> "Future[Tensor]":
        return self.child_of(_TABLE, at.step).reduce_rows(gradient, name, at)

    def memories(self) -> Sequence[Memory]:
        """Return the memories of all, each once."""
        return tuple({id(memory): memory for child in self.children() for memory in child.memories()}.values())

    def memory_of(self, segment: Segment) -> Memory:
        """Return that of the child that takes it in the long run."""
        return self.child_of(segment, math.inf).memory_of(segment)

    @override
    def holding(self, segment: Segment) -> Sequence[Memory]:
        return self.child_of(segment, math.inf).holding(segment)

    @override
    def waiting_length(self, segment: Segment) -> int:
        return self.child_of(segment, math.inf).waiting_length(segment)

    def _divided(self, segments: Segments, step: int) -> list[tuple[Reducer, Segments]]:
        parts = {id(child): (child, list[Segment]()) for child in self.children()}  # one may stand in two places
        for segment in segments:
            parts[id(self.child_of(segment, step))][1].append(segment)
        return [(child, Segments(mine)) for child, mine in parts.values() if mine]


@final
@checked
@dataclass(frozen=True, kw_only=True)
class WarmUp(Routing):
    """Use one recipe for the first steps, then another.

    Args:
        steps: How long `first` is used.
        first, then: To carry the memory over, give both the same memory object.

    Raises:
        ValueError: If `first` keeps a residual in a memory that `then` lacks: it would never be sent.
    """

    steps: Size
    first: Reducer
    then: Reducer

    def __post_init__(self) -> None:
        known = {id(memory) for memory in self.then.memories()}
        if left := [each for each in self.first.memories() if each.stateful and id(each) not in known]:
            raise ValueError(
                f"first keeps a residual in {left[0]}, which then lacks, so it would never be sent; expected the same "
                "memory object in both"
            )

    @override
    def children(self) -> Sequence[Reducer]:
        return self.first, self.then

    @override
    def child_of(self, segment: Segment, step: float) -> Reducer:
        return self.first if step < self.steps else self.then

    @override
    def turn(self, step: int) -> Hashable:
        return step < self.steps


@final
@checked
@dataclass(frozen=True, kw_only=True)
class MinimumSize(Routing):
    """Use one recipe from `minimum_size` elements on, and another below: by default, one that does not compress."""

    minimum_size: Size
    small: Reducer = field(default_factory=_uncompressed)
    large: Reducer

    def children(self) -> Sequence[Reducer]:
        """Return both, the one for large tensors first."""
        return self.large, self.small

    def memories(self) -> Sequence[Memory]:
        """Return the memories of both, in the order in which states have them."""
        return tuple({id(memory): memory for each in (self.small, self.large) for memory in each.memories()}.values())

    @override
    def child_of(self, segment: Segment, step: float) -> Reducer:
        return self.large if segment.length >= self.minimum_size else self.small


@final
@checked
@dataclass(frozen=True, kw_only=True)
class PerTensor(Routing):
    """Use for each parameter the reducer that `chosen` names, or else `otherwise`.

    Raises:
        ValueError: For a name without reducer.
    """

    reducers: Mapping[str, Reducer]
    chosen: Mapping[str, str]
    otherwise: Reducer

    def __post_init__(self) -> None:
        if unknown := sorted(set(self.chosen.values()) - self.reducers.keys()):
            raise ValueError(f"chosen names {unknown[0]!r}; expected one of {', '.join(self.reducers)}")

    def children(self) -> Sequence[Reducer]:
        """Return those in use, `otherwise` last."""
        used = set(self.chosen.values())
        return [*(reducer for name, reducer in self.reducers.items() if name in used), self.otherwise]

    @property
    @override
    def chosen_for(self) -> Set[str]:
        return super().chosen_for | self.chosen.keys()

    @override
    def child_of(self, segment: Segment, step: float) -> Reducer:
        return self.reducers[self.chosen[segment.name]] if segment.name in self.chosen else self.otherwise

    @override
    def rebuilt(self, change: Callable[[Reducer], Reducer]) -> Reducer:
        reducers = {name: each.rebuilt(change) for name, each in self.reducers.items()}
        return replace(self, reducers=reducers, otherwise=self.otherwise.rebuilt(change))


@final
@checked
@dataclass(frozen=True, kw_only=True)
class Released(Reducer):
    """Send gradients uncompressed, plus the residuals of another reducer's memories that can release them."""

    waiting: tuple[Memory, ...]
    dense: Reducer = field(default_factory=_uncompressed)

    @override
    def reduce(self, bucket: Bucket, at: Round) -> "Future[Mean]":
        release(self.waiting, bucket, at.scale)
        return self.dense.reduce(bucket, at)

    def memories(self) -> Sequence[Memory]:
        """Return the memories that may hold a residual."""
        return self.waiting

    def memory_of(self, segment: Segment) -> Memory:
        """Return the memory that goes out with the next gradient; if there is none, that of `dense`."""
        return next(iter(self.holding(segment)), self.dense.memory_of(segment))

    @override
    def holding(self, segment: Segment) -> Sequence[Memory]:
        return [memory for memory in self.waiting if any(part.releases for part in memory.parts)]


def release(waiting: Sequence[Memory], bucket: Bucket, scale: float) -> None:
    """Add the residuals of these memories to gradients that are sent uncompressed; `commit` then drops it there."""
    releasing = [part for memory in waiting for part in memory.parts if part.releases]
    for segment, gradient in zip(bucket.segments, bucket.views(), strict=True):
        for memory in releasing:
            if memory.waits(segment.name):
                memory.release(segment.name, gradient, scale)


@final
@checked
@dataclass(frozen=True, kw_only=True)
class WithRows(Routing):
    """Send the rows of sparse embeddings' gradients through `rows`, an exchange of tables; `dense` does the rest."""

    rows: Exchange
    dense: Reducer

    def __post_init__(self) -> None:
        if not self.rows.uneven:
            raise TypeError(
                f"{self.rows} needs the same number of rows from all ranks, and sparse embeddings have different "
                "ones; use UnionAllReduce, OwnerSharded or RecursiveDoubling"
            )

    @override
    def children(self) -> Sequence[Reducer]:
        return (self.dense,)

    @override
    def child_of(self, segment: Segment, step: float) -> Reducer:
        return self.dense

    @override
    def prepare(self, group: Group, samples: Sequence[Tensor] = ()) -> None:
        self.rows.prepare(group)
        super().prepare(group, samples)

    def reduce_rows(self, gradient: Tensor, name: str, at: Round) -> "Future[Tensor]":
        """Start the exchange. Ranks may hold different rows, and different numbers of them."""
        listeners = at.listeners
        with trace.span("encode", *listeners):
            gradient = gradient.coalesce()
            note_rows(gradient, at)
            values = gradient.values() * at.scale
            width = values[0].numel() if len(values) else gradient.shape[1:].numel()
            keys = gradient.indices()[0].to(torch.int32)
            table = Blocks(keys=keys, values=values.reshape(-1), numel=gradient.shape[0] * width, width=width)
        shape, start = gradient.shape, trace.now()
        future = self.rows.start(table, at.group, seeds=[at.seed(name)])

        def finish(done: "Future[Exchanged]") -> Tensor:
            exchanged = done.value()  # raises what the exchange raised
            trace.took("exchange", start, listeners)
            trace.count("sent_bytes", exchanged.sent_bytes, *listeners)
            with trace.span("decode", *listeners):
                total = exchanged.total
                assert isinstance(total, Keyed)
                keys, rows = total.keys[None].long(), total.rows.reshape(-1, *shape[1:])
                return torch.sparse_coo_tensor(keys, rows, shape, is_coalesced=True, check_invariants=False)

        return future.then(finish)

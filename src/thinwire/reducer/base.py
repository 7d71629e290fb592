"""The one small interface above memory, codec and exchange."""

import math
import re
import weakref
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count
from typing import Any, NamedTuple, TypeVar, cast, final

from torch import Tensor
from torch.futures import Future

from thinwire import trace
from thinwire.collectives import Group, Staging, all_reduce, fulfil, promised
from thinwire.kernels.parts import Cut, Parts
from thinwire.memories import Memory
from thinwire.payloads import Payload
from thinwire.trace import Listener
from thinwire.waits import Verdict

T = TypeVar("T")
# the address of a function, such as one in a schedule
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


@final
@dataclass(frozen=True, kw_only=True)
class Segment:
    """The gradient of one parameter in a bucket.

    Args:
        name: The parameter's.
        offset, length: Its elements in the bucket.
        shape: Its sizes in the order in which these elements lie, the outermost dimension first.
    """

    name: str
    offset: int
    length: int
    shape: tuple[int, ...] = ()


@final
class Segments(tuple[Segment, ...]):
    """Segments of a bucket that take the same path, and figures about them that are computed once."""

    @cached_property
    def names(self) -> list[str]:
        """The parameters' names."""
        return [segment.name for segment in self]

    @cached_property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shape of each segment."""
        return [segment.shape for segment in self]

    @cached_property
    def cut(self) -> Cut:
        """Where each segment lies in the bucket."""
        return Cut([segment.offset for segment in self], [segment.length for segment in self])

    @cached_property
    def coalesced(self) -> "Segments":
        """Adjacent ones joined. Their names then no longer stand for parameters."""
        runs: list[tuple[Segment, int]] = []  # each run's first segment, and where the run ends
        for segment in sorted(self, key=lambda segment: segment.offset):
            if runs and runs[-1][1] == segment.offset:
                runs[-1] = runs[-1][0], segment.offset + segment.length
            else:
                runs.append((segment, segment.offset + segment.length))
        return Segments(replace(first, length=end - first.offset, shape=()) for first, end in runs)

    @cached_property
    def _known(self) -> "dict[tuple[int, Hashable], tuple[weakref.ref[Any], Any]]":
        return {}

    def once(self, owner: object, key: Hashable, make: Callable[[], T]) -> T:
        """Return what `make` returned for this owner and key when it was first asked.

        What was made for an owner that is gone is forgotten when something is made for another.
        """
        maker, made = self._known.get((id(owner), key), (None, None))
        if maker is None or maker() is not owner:  # an id may come again
            for place in [place for place, (other, _) in self._known.items() if other() is None]:
                del self._known[place]
            made = make()
            self._known[id(owner), key] = weakref.ref(owner), made
        return cast(T, made)


@final
class Bucket:
    """Gradients of several parameters in one flat tensor, and the segments of it to reduce."""

    __slots__ = ("flat", "segments")

    def __init__(self, *, flat: Tensor, segments: Sequence[Segment]) -> None:
        self.flat = flat
        self.segments = segments if isinstance(segments, Segments) else Segments(segments)

    def views(self) -> Parts:
        """Return the gradient of each segment, as a view."""
        return Parts(self.flat, self.segments.cut)


@final
@dataclass(frozen=True, kw_only=True)
class Round:
    """What a reducer needs to know of one reduction.

    Args:
        step: The step's number, from 0.
        group: The ranks.
        scale: Turns sums into means.
        draw: Numbers this reduction, so that its random choices differ from those of others. By default it is the
            step's number, which is enough if a step has one reduction.
        watch: Whether to check that results are finite.
        listeners: Are told what the reduction sends, and how long each part of it takes.
        verdict: Records faults in received payloads, so that the host need not wait for a GPU. The caller then checks
            whether the mean is finite.
        staging: Where buffers that travel come from.
    """

    step: int
    group: Group
    scale: float
    draw: int | None = None
    watch: bool = True
    listeners: tuple[Listener, ...] = ()
    verdict: Verdict | None = None
    staging: Staging = field(default_factory=Staging)

    def seed(self, name: str, *, shared: bool = True) -> int:
        """Return a 32-bit seed that depends only on the draw and the name, and on the rank unless `shared`."""
        return Seeds(self, [name], shared=shared)[0]


@final
class Seeds(Sequence[int]):
    """The seeds of several names in one reduction, computed when somebody reads one; `shared` as in `Round.seed`."""

    def __init__(self, at: Round, names: Sequence[str], *, shared: bool) -> None:
        self._at, self._names, self._shared = at, names, shared

    @cached_property
    def _each(self) -> list[int]:
        at, rank = self._at, b"" if self._shared else f"/{self._at.group.rank()}".encode()
        draw = zlib.crc32(f"{at.step if at.draw is None else at.draw}/".encode())
        return [zlib.crc32(name.encode() + rank, draw) for name in self._names]

    def __len__(self) -> int:
        return len(self._names)

    def __iter__(self) -> Iterator[int]:
        return iter(self._each)

    def __getitem__(self, index: Any) -> Any:
        """Return one, or several."""
        return self._each[index]


class Mean(NamedTuple):
    """A bucket that holds the mean.

    Args:
        finite: Whether the mean is finite; True if that was not checked (`Round.watch`).
        flat: The bucket's tensor, for a GPU: waiting for a future waits only for the streams that wrote the tensors it
            holds.
    """

    finite: bool
    flat: Tensor


class Reducer(ABC):
    """Turns the gradients of a bucket into their mean over all ranks, in place, bit-identical everywhere.

    `reduce` starts its collectives before it returns, in an order that depends only on its arguments.
    """

    @property
    def changes(self) -> bool:
        """Whether `memory_of` a parameter may change from step to step."""
        return False

    @property
    def by_library(self) -> bool:
        """Whether a GPU sums means by a library, whose bits depend on the GPU's model: all ranks need the same."""
        return False

    @property
    def chosen_for(self) -> Set[str]:
        """The parameters that it names."""
        return frozenset()

    def route(self, segment: Segment, step: float = math.inf) -> "Reducer":
        """Return the reducer that a segment's gradient goes through: this one, or one inside.

        Args:
            segment: The gradient's.
            step: The step's number; by default it is answered for the long run, after any warm-up.
        """
        return self

    def rebuilt(self, change: "Callable[[Reducer], Reducer]") -> "Reducer":
        """Return this recipe with `change` applied to everything that `route` may return."""
        return change(self)

    def prepare(self, group: Group, samples: Sequence[Tensor] = ()) -> None:  # noqa: B027 - most need nothing
        """Set up what `reduce` needs, and compile its kernels. A collective.

        Args:
            group: The ranks.
            samples: Flat tensors like those that buckets will have.
        """

    def begin(self, at: Round) -> None:  # noqa: B027 - most have nothing to decide
        """Decide how this reduction is done. May use collectives.

        `memory_of` stays the same until the next one.

        Args:
            at: The reduction.
        """

    @abstractmethod
    def reduce(self, bucket: Bucket, at: Round) -> "Future[Mean]":
        """Start reducing a bucket.

        Args:
            bucket: The gradients, which are replaced by their means.
            at: The reduction.

        Returns:
            A future, which is done once the bucket holds the means.
        """

    def reduce_rows(self, gradient: Tensor, name: str, at: Round) -> "Future[Tensor]":
        """Start reducing the gradient of a sparse embedding, by default uncompressed, as in DDP.

        Args:
            gradient: A COO tensor.
            name: The parameter's.
            at: The reduction.

        Returns:
            A future of its mean, sparse too.
        """
        mean = (gradient * at.scale).coalesce()
        listeners, start = at.listeners, trace.now()
        trace.count("sent_bytes", note_rows(mean, at), *listeners)

        def finish(done: "Future[Any]") -> Tensor:
            (mean,) = done.value()  # raises what the collective raised
            trace.took("exchange", start, listeners)
            return cast(Tensor, mean.detach())  # a new tensor, so that the lent alias is freed

        return all_reduce(mean, at.group).then(finish)

    @abstractmethod
    def memories(self) -> Sequence[Memory]:
        """Return every memory in use, each once."""

    @abstractmethod
    def memory_of(self, segment: Segment) -> Memory:
        """Return the memory that gradients of a segment's parameter go through in the long run."""

    def holding(self, segment: Segment) -> Sequence[Memory]:
        """Return every memory that may hold a residual of a segment's parameter.

        It is sent, or returned to the optimizer, when the recipe is removed.
        """
        return (self.memory_of(segment),)

    def waiting_length(self, segment: Segment) -> int:
        """Return how many elements a residual has for a segment: by default, those of its gradient."""
        return segment.length


def words(recipe: object) -> str:
    """Return a recipe, or a part of one, in words, which are the same in every process."""
    return _ADDRESS.sub("", repr(recipe))


def note_values(payload: Payload, listeners: Sequence[Listener]) -> None:
    """Report how many of the payload's elements travel."""
    if listeners:
        carried = payload.carried()
    for listener in listeners:
        listener.add("values", carried)


def note_rows(gradient: Tensor, at: Round) -> int:
    """Report a coalesced gradient's rows, which all travel, and return the bytes that DDP sends for it."""
    nbytes = (at.group.size() - 1) * (gradient.indices().nbytes + gradient.values().nbytes)
    for listener in at.listeners:
        listener.add("dense_bytes", nbytes)
        listener.add("elements", gradient.values().numel())
        listener.add("values", gradient.values().numel())
    return nbytes


def completed(mean: Mean) -> "Future[Mean]":
    """Return a future that is done, as there was nothing to do."""
    future: Future[Mean] = Future()
    future.set_result(mean)
    return future


def joined(futures: "Sequence[Future[Mean]]", flat: Tensor) -> "Future[Mean]":
    """Return the future of a bucket that is reduced in several parts. It raises what any of them raised.

    torch's `collect_all` does not say on which of a GPU's streams the parts were written, and this does.
    """
    if not futures:
        return completed(Mean(True, flat))
    if len(futures) == 1:
        return futures[0]

    def together() -> Mean:  # all are done: on a GPU this stream waits, not the host
        finite = True
        for future in futures:
            finite &= future.wait().finite
        return Mean(finite, flat)

    whole = promised(futures, flat.device)
    done = count(1)

    def finish(_: "Future[Mean]") -> None:
        if next(done) == len(futures):
            fulfil(whole, together)

    for future in futures:
        future.add_done_callback(finish)
    return whole

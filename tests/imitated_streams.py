"""An imitation of a GPU's streams: who waits for whom, and which accesses of memory nothing puts in an order.

Tensors are fake ones in main memory that say they lie on a GPU. Each stream has vector clocks (Mattern 1988), which
events, waits and collectives pass on. To touch what another stream has written or read without having waited for it is
a race. A kernel may write to everything that it is given, but for kept constants.
"""

import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves

from thinwire.kernels import memory, replay, streams
from thinwire.reducer import Reducer
from thinwire_lab.check.gpu import counting
from thinwire_lab.check.gpu.buckets import WORLD, Case, Work

CPU = torch.device("cpu")
_Group: Any = dist.ProcessGroup  # whose stubs want every old overload of what is overridden
Access = tuple[int, bool]
"""A storage, and whether it is written."""


class Stream:
    """One of a GPU's."""

    device, device_index = CPU, 0

    def __init__(self, device: object = None, priority: int = 0) -> None:
        self.clock: dict[int, int] = defaultdict(int)
        self.cuda_stream, self.priority = id(self), priority

    def tick(self) -> "Event":
        """Go on by a piece of work. Return the event after it."""
        self.clock[self.cuda_stream] += 1
        return self.record_event()

    def knows(self, clock: dict[int, int]) -> bool:
        """Whether it has waited for a time."""
        return all(self.clock[stream] >= time for stream, time in clock.items())

    def wait_event(self, event: "Event") -> None:
        """Wait for what another stream had then."""
        for stream, time in event.clock.items():
            self.clock[stream] = max(self.clock[stream], time)

    def wait_stream(self, other: "Stream") -> None:
        """Wait for what another stream has."""
        self.wait_event(other.record_event())

    def record_event(self) -> "Event":
        """Return an event after what it has."""
        event = Event()
        event.record(self)
        return event


class Event:
    """What a stream had at a time."""

    def __init__(self) -> None:
        self.clock: dict[int, int] = {}

    def record(self, stream: Stream) -> None:
        """Note what a stream has."""
        self.clock = dict(stream.clock)

    def synchronize(self) -> None:
        """Do nothing: the host's waits are not looked at."""


class Graph:
    """A captured piece of work: the accesses of which it is made."""

    def __init__(self) -> None:
        self._accesses: list[Access] = []
        self._begun, self._streams = Event(), set[Stream]()

    def capture_begin(self, **_: object) -> None:
        """From now on nothing runs. Streams that wait for this one belong to the capture."""
        self._begun = Races.now.stream.tick()
        Races.now.captured = self

    def note(self, accesses: Sequence[Access]) -> None:
        """Note what is done in the current stream."""
        stream = Races.now.stream
        if not stream.knows(self._begun.clock):
            Races.now.found.append(f"is not captured: {_where()}")
        stream.tick()
        self._streams.add(stream)
        self._accesses += accesses

    def capture_end(self) -> None:
        """Go on as before, in the stream where it began."""
        if not all(Races.now.stream.knows(each.clock) for each in self._streams):
            Races.now.found.append("a capture ends before one of its streams has")
        Races.now.captured = None

    def replay(self) -> None:
        """Do it in the current stream."""
        Races.now.access(self._accesses)


class Races(counting._Count):
    """Notes every access, and what is wrong with it."""

    now: "Races"

    def __init__(self) -> None:
        super().__init__()
        Races.now = self
        self.stream, self.found = Stream(), list[str]()
        self.captured: Graph | None = None
        self._written: dict[int, tuple[int, int]] = {}
        self._read: dict[int, dict[int, int]] = defaultdict(dict)
        self._kept: list[Any] = []  # or another tensor could lie there
        self._constants: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.is_view or func.overloadpacket.__name__ in counting.ALLOCATIONS | counting.QUESTIONS:
            return out
        places = zip(func._schema.arguments, args, strict=False)
        changed = [x for place, x in places if place.alias_info is not None and place.alias_info.is_write]
        self.access([*self._of((args, kwargs), write=False), *self._of((changed, out), write=True)])
        return out

    def moved(self, given: Any) -> None:
        """Take it that a kernel writes to all that it is given, and to what lies at addresses that it is given."""
        found = [x for x in tree_leaves(given) if isinstance(x, Tensor)]
        found += [y for x in found for y in self._behind.get(counting._place(x), ())]
        self.access(self._of(found, write=True))

    def constant(self, x: Tensor) -> None:
        """Note that nobody writes to a tensor."""
        self._constants.add(x.untyped_storage()._cdata)

    def access(self, accesses: Sequence[Access]) -> None:
        """Note accesses in the current stream, or in the graph that is captured."""
        if self.captured is not None:
            self.captured.note(accesses)
            return
        me = self.stream.cuda_stream
        self.stream.tick()
        for place, write in accesses:
            others = [self._written[place]] if place in self._written else []
            others += self._read[place].items() if write else []
            if not all(self.stream.knows({stream: time}) for stream, time in others):
                self.found.append(f"{'writes' if write else 'reads'} what it did not wait for: {_where()}")
            if write:
                self._written[place] = me, self.stream.clock[me]
                self._read[place].clear()
            else:
                self._read[place][me] = self.stream.clock[me]

    def _of(self, given: Any, *, write: bool) -> list[Access]:
        held = [x.untyped_storage() for x in tree_leaves(given) if isinstance(x, Tensor)]
        self._kept += held
        return [(each._cdata, write and each._cdata not in self._constants) for each in held]


def _where() -> str:
    lines = [f for f in traceback.extract_stack() if "/src/thinwire/" in f.filename]
    return " < ".join(f"{f.filename.split('/src/')[1]}:{f.lineno}" for f in lines[:-4:-1])


class Group(_Group):  # type: ignore[misc]  # so its base has no type
    """Rank 0 of several, whose collectives run on a stream of their own; or in the current one, and none waits."""

    def __init__(self, *, apart: bool) -> None:
        super().__init__(0, WORLD)
        self._stream = Stream() if apart else None
        world: Any = dist.distributed_c10d._world  # which torch asks who is in a group
        world.pg_map[self], world.pg_group_ranks[self] = ("imitated", FakeStore()), {0: 0}

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """Return one that is nobody's."""
        return "imitated"

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> Any:
        """Write to a tensor."""
        return self._over(tensors[0], tensors[0])

    def all_gather_single(self, out: Tensor, mine: Tensor, opts: Any = None) -> Any:
        """Read one tensor, and write to another."""
        return self._over(out, mine)

    _allgather_base = all_gather_single  # the names before torch 2.13

    def all_to_all_single(self, out: Tensor, mine: Tensor, *_: Any) -> Any:
        """Read one tensor, and write to another."""
        return self._over(out, mine)

    alltoall_base = all_to_all_single

    def _over(self, out: Tensor, mine: Tensor) -> Any:
        stream = self._stream or Races.now.stream
        streams.follow(stream, Races.now.stream)
        with streams.within(stream):
            out.fill_(mine.view(-1)[0])

        def wait() -> list[Tensor]:
            if self._stream is not None:
                Races.now.stream.wait_stream(self._stream)
            return [out]

        future = SimpleNamespace(done=lambda: True, wait=wait, value=lambda: [out])
        return SimpleNamespace(get_future=lambda: future, wait=wait)


@contextmanager
def imitating() -> Iterator[Races]:
    """Have fake tensors lie on a GPU, whose streams are imitated, and note races."""
    kept = memory.kept.__call__

    def constant(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        x: Tensor = kept(self, *args, **kwargs)
        Races.now.constant(x)
        return x

    def set_stream(stream: Stream) -> None:
        Races.now.stream = stream

    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "Stream": Stream,
            "Event": Event,
            "CUDAGraph": Graph,
            "graph_pool_handle": object,
            "current_device": lambda: 0,
            "current_stream": lambda _=None: Races.now.stream,
            "set_stream": set_stream,
        }.items():
            patch.setattr(torch.cuda, name, value)
        patch.setattr(FakeTensor, "record_stream", lambda self, stream: None, raising=False)
        patch.setattr(memory.kept, "__call__", constant)
        patch.setattr(counting, "_Count", Races)
        patch.setattr(FakeTensor, "is_cuda", True, raising=False)
        patch.setattr(replay, "LANES", {"cpu": replay.Lane})
        _forget()
        with counting.gpu_path(), FakeTensorMode(allow_non_fake_inputs=True), counting.counting():
            yield Races.now
    _forget()


def _forget() -> None:
    replay._lane.cache_clear()
    streams.stream_of.cache_clear()


def races(make: Callable[[], Reducer], *, apart: bool, steps: int = 5) -> list[str]:
    """Return what is wrong with a recipe's steps, from launches one by one to replays. `apart`: see `Group`."""
    with imitating() as found:
        works = [Work(Case(recipe="dense", tensors=3, dtype="float32", numel=3 * 2048), CPU) for _ in "ab"]
        group = Group(apart=apart)
        for work in works:
            work.group, work.recipe = group, make()
        for _ in range(steps):
            for work in works:
                work.prepare()
            futures = [work.start() for work in works]
            for future in futures:
                future.wait()
            for work in works:
                work.end()
        return found.found

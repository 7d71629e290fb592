"""An imitation of a GPU's streams: who waits for whom, and which accesses of memory nothing puts in an order.

Tensors are fake ones in main memory that say they lie on a GPU. Each stream has vector clocks (Mattern 1988), which
events, waits and collectives pass on. To touch what another stream has written or read without having waited for it is
a race. A kernel may write to everything that it is given, but for kept constants and what lies outside its regions.
The host, which writes to pinned memory, counts as a stream: what is queued comes after what it did.

As torch does, it gives memory back to the stream that asked for it, once all is done of streams that were recorded. To
free what another stream is told to use, without either a wait or a record, is a fault, too; so is to replay it.
"""

import traceback
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from contextvars import Context
from inspect import signature
from itertools import count
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves

from thinwire import trace
from thinwire.collectives import thread
from thinwire.kernels import Kernel, dispatch, memory, replay, streams
from thinwire.kernels.parts import Parts, Regions
from thinwire.reducer import Reducer
from thinwire_lab.check.gpu import counting
from thinwire_lab.check.gpu.buckets import Case, Work
from thinwire_lab.check.gpu.late import LateGroup

CPU = torch.device("cpu")


class Access(NamedTuple):
    """Bytes of a storage, from `begin` to before `end`, and whether they are written."""

    storage: int
    begin: int
    end: int
    write: bool

    def meets(self, other: "Access") -> bool:
        """Whether the order matters, in one storage."""
        return (self.write or other.write) and self.begin < other.end and other.begin < self.end

    def holds(self, other: "Access") -> bool:
        """Whether it touches all that the other one does, in one storage."""
        return self.write >= other.write and self.begin <= other.begin and other.end <= self.end


class Stream:
    """One of a GPU's."""

    device, device_index = CPU, 0
    made = 0

    def __init__(self, device: object = None, priority: int = 0) -> None:
        Stream.made += 1
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
        """Have the host wait."""
        Races.now.host.wait_event(self)


class Graph:
    """A captured piece of work: the accesses of which it is made."""

    def __init__(self) -> None:
        self._accesses: list[Access] = []
        self._launches = 0
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
        self._launches += 1
        self._streams.add(stream)
        self._accesses += accesses

    def capture_end(self) -> None:
        """Go on as before, in the stream where it began."""
        if not all(Races.now.stream.knows(each.clock) for each in self._streams):
            Races.now.found.append("a capture ends before one of its streams has")
        Races.now.captured = None
        Races.now.launches.append(self._launches)

    def replay(self) -> None:
        """Do it in the current stream."""
        Races.now.replays += 1
        Races.now.access(self._accesses)
        Races.now.replayed[Races.now.stream] = dict(Races.now.stream.clock)


class Races(counting._Count):
    """Notes every access, and what is wrong with it."""

    now: "Races"

    def __init__(self) -> None:
        super().__init__()
        Races.now = self
        self.stream, self.host, self.found = Stream(), Stream(), list[str]()
        self.captured: Graph | None = None
        self.replays, self.launches = 0, list[int]()  # of each graph
        self.replayed: dict[Stream, dict[int, int]] = {}  # where, and what it had last
        self._done: dict[int, list[tuple[Access, int, int]]] = defaultdict(list)  # by storage: what, where and when
        self._numbers: dict[int, int] = {}  # of storages that are there: where others lay, new ones may
        self._homes: dict[int, Stream] = {}  # who is given the memory back
        # The host is done with what it does at once.
        self._recorded: dict[int, set[int]] = defaultdict(lambda: {self.host.cuda_stream})
        self._gone: set[int] = set()
        self._lying: dict[tuple[int, int], list[Access]] = {}  # at the addresses in a table
        self.collective = False
        """Whether a collective is running, which records by itself all that it is given."""
        self._count = count()
        self._constants: set[int] = set()
        self._cut: dict[Access, list[Access]] = {}
        self._pinned: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in [x for x in tree_leaves(out) if isinstance(x, Tensor)]:
            self._number(x)
        if (kwargs or {}).get("pin_memory"):
            self._pinned.add(self._number(out))
            self._homes.pop(self._number(out))
        if func.is_view or func.overloadpacket.__name__ in counting.ALLOCATIONS | counting.QUESTIONS:
            return out
        places = zip(func._schema.arguments, args, strict=False)
        changed = tree_leaves([x for place, x in places if place.alias_info is not None and place.alias_info.is_write])
        accesses = [*self._of((args, kwargs), write=False), *self._of((changed, out), write=True)]
        queued = func is torch.ops.aten.copy_.default and any(args[2:])  # non_blocking
        by_host = not queued and any(self._number(x) in self._pinned for x in changed)
        self._touch(accesses, self.host) if by_host else self.access(accesses)
        return out

    def moved(self, given: Any) -> None:
        """Take it that a kernel writes to all that it is given, and to what lies at addresses that it is given."""
        found = [x for x in tree_leaves(given) if isinstance(x, Tensor)]
        behind = [y for x in found for y in self._lying.get((self._number(x), int(x.storage_offset())), ())]
        self.access([*self._of(found, write=True), *self._parts(behind)])

    def tabled(self, table: Tensor, columns: Sequence[Any]) -> None:
        """Note what lies at the addresses in a column of a table. It is not kept: nothing real would keep it."""
        for i, column in enumerate(columns):
            row = table[i]
            held = [x for x in getattr(column, "of", ()) if x.numel()]
            self._lying[self._number(row), int(row.storage_offset())] = [self._access(x, write=True) for x in held]

    def record(self, x: Tensor, stream: Stream) -> None:
        """Note that a stream uses a tensor, whose memory is given to nobody before it has."""
        self._recorded[self._number(x)].add(stream.cuda_stream)

    def constant(self, x: Tensor) -> None:
        """Note that nobody writes to a tensor."""
        self._constants.add(self._number(x))

    @contextmanager
    def cut(self, out: Tensor, regions: Regions) -> Iterator[None]:
        """Within, take it that of a tensor only its regions, each an offset and a length, are touched."""
        for write in (True, False):
            whole = self._access(out, write=write)
            edges = ((whole.begin + offset * out.itemsize, length * out.itemsize) for offset, length in regions)
            self._cut[whole] = [whole._replace(begin=begin, end=begin + nbytes) for begin, nbytes in edges]
        yield
        self._cut.clear()

    def access(self, accesses: Sequence[Access]) -> None:
        """Note accesses in the current stream, or in the graph that is captured."""
        if self.captured is not None:
            self.captured.note(accesses)
            return
        self.stream.wait_stream(self.host)
        self._touch(accesses, self.stream)

    def _touch(self, accesses: Sequence[Access], by: Stream) -> None:
        me = by.cuda_stream
        by.tick()
        for new in accesses:
            if new.storage in self._gone:
                self.found.append(f"replays what was freed: {_where()}")
            if self.collective:
                self._recorded[new.storage].add(me)
            done = self._done[new.storage]
            if not all(by.knows({stream: time}) for old, stream, time in done if new.meets(old)):
                self.found.append(f"{'writes' if new.write else 'reads'} what it did not wait for: {_where()}")
            # Who waits for this one has waited for what it follows.
            done[:] = [each for each in done if not (new.holds(each[0]) and (new.write or each[1] == me))]
            done.append((new, me, by.clock[me]))

    def _of(self, given: Any, *, write: bool) -> list[Access]:
        held = [x for x in tree_leaves(given) if isinstance(x, Tensor) and x.numel()]
        return self._parts([self._access(x, write=write) for x in held])

    def _parts(self, whole: Sequence[Access]) -> list[Access]:
        return [part for each in whole for part in self._cut.get(each, [each])]

    def _number(self, x: Tensor) -> int:
        """Return the number of a tensor's storage, which no other one is ever given."""
        storage = x.untyped_storage()
        if storage._cdata not in self._numbers:
            number = self._numbers[storage._cdata] = next(self._count)
            if self.captured is None:  # what a capture asks for lies in memory of its own, which is not given back
                self._homes[number] = self.stream
            weakref.finalize(storage, self._freed, storage._cdata).atexit = False
        return self._numbers[storage._cdata]

    def _freed(self, place: int) -> None:
        number = self._numbers.pop(place)
        home, done, recorded = self._homes.pop(number, None), self._done.pop(number, ()), self._recorded[number]
        if home is None:
            return
        self._gone.add(number)
        used = {
            stream: time for _, stream, time in done if stream not in recorded and not self.host.knows({stream: time})
        }
        if not home.knows(used):
            self.found.append(f"frees what another stream uses and was not recorded for: {_where()}")

    def _access(self, x: Tensor, *, write: bool) -> Access:
        storage, begin = self._number(x), x.storage_offset() * x.itemsize
        span = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
        end = begin + span * x.itemsize
        return Access(storage, int(begin), int(end), write and storage not in self._constants)


def _where() -> str:
    lines = [f for f in traceback.extract_stack() if "/src/thinwire/" in f.filename]
    return " < ".join(f"{f.filename.split('/src/')[1]}:{f.lineno}" for f in lines[:-4:-1])


class Group(LateGroup):
    """One rank of several, whose collectives run on a stream of their own; or in the current one, and none waits.

    gloo: as Gloo has it, futures have nobody wait for that stream, and works do.
    """

    def __init__(self, *, apart: bool, gloo: bool = False) -> None:
        super().__init__(CPU)
        self._apart, self._gloo = Stream() if apart else None, gloo

    def name(self) -> str:
        """Return the backend."""
        return "gloo" if self._gloo else "late"

    def _ended(self, x: Tensor, work: Callable[[], object]) -> Any:
        stream = self._apart or Races.now.stream
        streams.follow(stream, Races.now.stream)
        with streams.within(stream), counting.patched((Races.now, "collective", True)):
            work()

        def wait() -> list[Tensor]:
            if self._apart is not None:
                Races.now.stream.wait_stream(self._apart)
            return [x]

        future = SimpleNamespace(done=lambda: True, wait=(lambda: [x]) if self._gloo else wait, value=lambda: [x])
        return SimpleNamespace(get_future=lambda: future, wait=wait)


class _Jobs:
    """In place of the queue of a thread: jobs are done at once, on the streams on which the thread would do them."""

    def put(self, job: Callable[[], None] | None) -> None:
        """Do a job."""
        if job is not None:
            Context().run(job)

    def get(self) -> None:
        """Tell the thread that there will be none."""


@contextmanager
def imitating(*, fake: bool = True) -> Iterator[Races]:
    """Have fake tensors lie on a GPU, whose streams are imitated, and note races.

    Or real ones, for work whose shapes depend on what they hold. Then references stand for kernels, and nothing is
    captured.
    """
    kept, call, submit = memory.kept.__call__, Kernel.__call__, thread.Worker.submit
    tensors: Any = FakeTensor if fake else Tensor

    def constant(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        x: Tensor = kept(self, *args, **kwargs)
        Races.now.constant(x)
        return x

    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature(self).bind(*args, **kwargs).arguments
        cuts = [(x.flat, x.cut.regions) for x in given.values() if isinstance(x, Parts)]
        if {"out", "regions"} <= given.keys():
            cuts.append((given["out"], given["regions"]))
        with ExitStack() as stack:
            for cut in cuts:
                stack.enter_context(Races.now.cut(*cut))
            return call(self, *args, **kwargs)

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
        patch.setattr(tensors, "record_stream", lambda self, stream: Races.now.record(self, stream), raising=False)
        patch.setattr(memory.kept, "__call__", constant)
        patch.setattr(Kernel, "__call__", called)
        patch.setattr(counting, "_Count", Races)
        patch.setattr(tensors, "is_cuda", True, raising=False)
        patch.setattr(replay, "LANES", {"cpu": replay.Lane} if fake else {})
        patch.setattr(thread, "SimpleQueue", _Jobs)
        patch.setattr(thread.Worker, "submit", lambda self, work, _: submit(self, work, torch.device("cuda", 0)))
        _forget()
        with ExitStack() as stack:
            stack.enter_context(counting.gpu_path())
            if fake:
                stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            else:
                patch.setattr(dispatch, "_GPUS", set())
            stack.enter_context(counting.counting())
            yield Races.now
    _forget()


def _forget() -> None:
    counting.forget()  # constants know streams, too
    replay._lane.cache_clear()
    streams.stream_of.cache_clear()


def raced(
    make: Callable[[], Reducer],
    *,
    apart: bool,
    shapes: tuple[tuple[int, ...], ...],
    dtype: str,
    fake: bool = True,
    steps: int = 5,
    gloo: bool = False,
    listeners: tuple[trace.Listener, ...] = (),
) -> Races:
    """Return what is noted in a recipe's steps, from launches one by one to replays. See `Group` and `imitating`."""
    case = Case(recipe="dense", tensors=len(shapes), dtype=dtype, numel=0, shapes=shapes)
    with imitating(fake=fake) as found, closing(Group(apart=apart, gloo=gloo)) as group:
        works = [Work(case, CPU, listeners) for _ in "ab"]
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
        return found

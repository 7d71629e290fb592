"""Work that a GPU repeats in every step: captured as a CUDA graph, and from then on one launch in place of dozens.

The host would take ten times as long to launch a bucket's kernels as the GPU takes to run them. What is captured runs
again on the same memory with the same numbers. So whatever it depends on is its key, and numbers that change with the
step are `Changing`: only `sent_anew` may read them, and it does so before every replay. Work that reads them elsewhere
is never captured.
"""

import gc
import os
import threading
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property, partial
from typing import Any, TypeVar, cast, final

import torch
from torch import Tensor

from thinwire.kernels.streams import follow, once, stream_of, within

T = TypeVar("T")
_ALIGN = 16  # bytes
_MOST = 16
"""How many pieces of work of one bucket are remembered: a few sets of buffers take turns."""


@final
class Changing(Sequence[T]):
    """Numbers that differ from step to step, made when they are read."""

    def __init__(self, make: Callable[[], Sequence[T]], length: int) -> None:
        self._make, self._length = make, length

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[T]:
        _note_reading()
        return iter(self._make())

    def __getitem__(self, i: Any) -> Any:
        """Return one, or those of a slice, which are made when they are read, too."""
        if isinstance(i, slice):
            return Changing(lambda: self._make()[i], len(range(*i.indices(self._length))))
        _note_reading()
        return self._make()[i]

    @cached_property
    def now(self) -> Sequence[T]:
        """They as they are in this step, for what is the same in every step."""
        recording = _open.get()
        return self._make() if recording is None else recording.reading(self._make)[0]


def changing(make: Callable[[], Sequence[T]], length: int) -> Sequence[T]:
    """Return what `make` returns; while work is recorded, as `Changing`."""
    return make() if _open.get() is None else Changing(make, length)


def fixed(numbers: Sequence[T]) -> Sequence[T]:
    """Return numbers, of which the caller takes only what is the same in every step."""
    return numbers.now if isinstance(numbers, Changing) else numbers


@final
class Recording:
    """What a piece of work takes from the host: numbers sent to the device, and tensors that are kept there.

    The first time this is a rehearsal: it finds out how many bytes are sent (`needs`), what must last (`places`), and
    whether the work can be repeated (`repeats`). The second time, with `room`, pinned bytes, the work is captured:
    numbers leave from there, and what must last goes to the places.
    """

    def __init__(self, room: Tensor | None = None, places: Sequence[Tensor] = ()) -> None:
        self.needs, self.repeats, self.places, self._lasting = 0, True, list(places), 0
        self.fills: list[tuple[Callable[[], Tensor], Tensor]] = []
        self._held: list[Tensor | None] = [room]  # a replay reads and writes them
        self._room, self._depth, self._changes = room, 0, False

    @property
    def capturing(self) -> bool:
        """Whether the work is captured, and not just rehearsed."""
        return self._room is not None

    def reading(self, make: Callable[[], T]) -> tuple[T, bool]:
        """Return what `make` returns, which may read what changes, and whether it did."""
        before, self._changes, self._depth = self._changes, False, self._depth + 1
        try:
            return make(), self._changes
        finally:
            self._changes, self._depth = before or self._changes, self._depth - 1

    def note_reading(self) -> None:
        """Note that something that changes is read."""
        self._changes = True
        if not self._depth:
            self.refuse()

    def refuse(self) -> None:
        """Note that the work cannot be repeated. Raises RuntimeError while it is captured."""
        self.repeats = False
        if self.capturing:
            raise RuntimeError("it read or made what its rehearsal did not; expected the same in every step")

    def end(self) -> None:
        """Let go of all that is held for captured work: there will be none."""
        self.repeats, self.places, self.fills, self._held, self._room = False, [], [], [], None

    def keep(self, x: Tensor) -> None:
        """Keep a tensor for as long as the work may be repeated."""
        self._held.append(x)

    def last(self, xs: Sequence[Tensor]) -> list[Tensor]:
        """Return tensors, moved to where no other work's replay writes."""
        if not self.capturing:
            self.places += [torch.empty_like(x, memory_format=torch.contiguous_format) for x in xs]
            return list(xs)
        begin, self._lasting = self._lasting, self._lasting + len(xs)
        places = self.places[begin : self._lasting]
        some = [(to, x.contiguous()) for to, x in zip(places, xs, strict=True) if x.numel()]
        if some:  # as bytes, whatever their dtypes, in one launch
            torch._foreach_copy_([_bytes(to) for to, _ in some], [_bytes(x) for _, x in some])
        return places

    def send(
        self, make: Callable[[], Tensor], plain: Callable[[Tensor, torch.device], Tensor], to: torch.device
    ) -> Tensor:
        """Send what `make` returns, now and before every replay."""
        x, changes = self.reading(make)
        begin, self.needs = self.needs, self.needs + -(-x.nbytes // _ALIGN) * _ALIGN
        if self._room is None:
            return plain(x, to)
        place = self._room[begin : begin + x.nbytes].view(x.dtype).view(x.shape)
        place.copy_(x)
        if changes:
            self.fills.append((make, place))
        return place.to(to, non_blocking=True)


_open: ContextVar[Recording | None] = ContextVar("thinwire.replay", default=None)


recording = _open.get
"""Returns what records the work that is being done; None if nothing does."""


def lasting(xs: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors, of which captured work has later work read them.

    Graphs of a lane share their memory: until a result has been read, another one's replay may have used its place.
    """
    recording = _open.get()
    return list(xs) if recording is None else recording.last(xs)


def _bytes(x: Tensor) -> Tensor:
    return x.view(-1).view(torch.uint8)


def _note_reading() -> None:
    recording = _open.get()
    if recording is not None:
        recording.note_reading()


@contextmanager
def _recorded(recording: Recording) -> Iterator[None]:
    token = _open.set(recording)
    try:
        yield
    finally:
        _open.reset(token)


@final
class Lane:
    """A stream of a GPU, and memory that its graphs share, as they run one after another.

    Work is captured on two streams that nobody else uses: a capture begins on one and goes on in the other. What
    another thread queues to the lane meanwhile stays out of it. And when torch frees a graph, it takes cuBLAS's memory
    from the stream where that capture began, though other graphs of the stream go on using it.
    """

    def __init__(self, device: torch.device, name: str) -> None:
        self._stream, self._pool, self.pinned = stream_of(device, name), torch.cuda.graph_pool_handle(), True
        self._captures = [torch.cuda.Stream(device, priority=-2) for _ in range(2)]
        self._lock = threading.Lock()  # buckets end in the threads of their collectives
        with self.taken():  # without any graph the memory would be given up, and torch cannot capture in it again
            self._keeper = self.captured(lambda: torch.zeros(1, dtype=torch.float32, device=device))

    @contextmanager
    def taken(self, *, alone: bool = False) -> Iterator[None]:
        """Within, work goes to this stream, after what the current one has, which then waits for it unless `alone`."""
        with self._lock:
            here = torch.cuda.current_stream(self._stream.device_index)
            follow(self._stream, here)
            try:
                with within(self._stream):
                    yield
            finally:
                if not alone:
                    follow(here, self._stream)

    def followed(self) -> Any:
        """Return a context in which work goes to this stream, after what it has."""
        return within(self._stream)

    def captured(self, work: Callable[[], Any]) -> "Graph":
        """Return work captured. Nothing has run yet."""
        return Graph(work, self._pool, self._captures, self._stream)


@final
class Graph:
    """A captured piece of work. `result`: what it returned, whose tensors every replay writes anew."""

    def __init__(self, work: Callable[[], Any], pool: Any, streams: Sequence[Any], runs_on: Any) -> None:
        self._graph, self._done, self._stream = torch.cuda.CUDAGraph(), torch.cuda.Event(), runs_on
        self.wait = self._done.synchronize  # until the last replay, of a step or more ago, has run
        first, second = streams
        collects = gc.isenabled()
        gc.disable()  # a capture does not survive that another graph is freed
        try:
            with within(first):
                # Other threads, NCCL's among them, go on calling what a capture does not allow.
                self._graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                try:
                    follow(second, first)
                    try:
                        with within(second):
                            self.result = work()
                    finally:
                        follow(first, second)
                finally:
                    self._graph.capture_end()
        finally:
            if collects:
                gc.enable()

    def replay(self) -> None:
        """Run it."""
        self._graph.replay()
        self._done.record(self._stream)


def wanted(asked: str | None) -> bool:
    """Return whether this value of THINWIRE_GRAPHS wants captures. Raises ValueError for an unknown one."""
    if asked in (None, "", "0", "1"):
        return asked != "0"
    raise ValueError(f"THINWIRE_GRAPHS={asked!r} is unknown; expected 1, or 0 to launch kernels one by one")


_Make = Callable[[torch.device, str], Any]
LANES: dict[str, _Make] = {"cuda": Lane} if wanted(os.environ.get("THINWIRE_GRAPHS")) else {}
"""What captures work, by kind of device."""


def possible(device: torch.device) -> bool:
    """Whether work on a device can be captured."""
    return device.type in LANES


@once
def _lane(device: torch.device, name: str) -> Any:
    return LANES[device.type](device, name)


@final
class Replays:
    """The repeated work of one bucket, on a lane called `name`.

    alone: once work is captured, the current stream does not wait for it. Whoever needs the result goes on
    in its lane, `followed`.
    """

    def __init__(self, device: torch.device, name: str, *, alone: bool = False) -> None:
        self._lane, self._alone = _lane(device, name), alone
        self._pieces = OrderedDict[Hashable, Piece]()

    def run(
        self, key: Hashable, work: Callable[[Sequence[int]], T], seeds: Sequence[int] = ()
    ) -> "tuple[T, Piece | None]":
        """Do work that depends on `key`, the seeds and what lies in memory. Return its result.

        The second time it is rehearsed, the third time captured. From then on every result is the same object, and a
        token comes with it that stands for the memory which the next replay overwrites.
        """
        piece = self._pieces.pop(key, None) or Piece(self._lane, len(seeds))
        self._pieces[key] = piece
        if len(self._pieces) > _MOST:
            self._pieces.popitem(last=False)
        with self._lane.taken(alone=self._alone and piece.graph is not None):
            return piece.run(work, seeds), piece if piece.graph is not None else None

    @property
    def nbytes(self) -> int:
        """Bytes of the places where what must last is kept."""
        return sum(x.nbytes for piece in list(self._pieces.values()) for x in piece.places)


@final
class Piece:
    """A piece of work, and how far it has come."""

    def __init__(self, lane: Any, count: int) -> None:
        now: list[Sequence[int]] = [()]  # what is captured may not hold the piece: dropped, it must go at once
        self.lane, self._now, self._seeds = lane, now, Changing(lambda: now[0], count)
        self._recording: Recording | None = None
        self._met, self.graph = False, cast(Any, None)

    @property
    def places(self) -> Sequence[Tensor]:
        """Where what must last is kept."""
        return () if self._recording is None else self._recording.places

    def run(self, work: Callable[[Sequence[int]], Any], seeds: Sequence[int]) -> Any:
        """Do it, as it is or from the graph."""
        self._now[0] = seeds
        if self.graph is None and self._recording is not None and self._recording.repeats:
            self._capture(work, self._recording)
        if self.graph is not None:
            return self._replayed()
        if self._met and self._recording is None:
            self._recording = Recording()
            with _recorded(self._recording):
                result = work(self._seeds)
            if not self._recording.repeats:
                self._recording.end()
            return result
        self._met = True
        return work(seeds)

    def _capture(self, work: Callable[[Sequence[int]], Any], before: Recording) -> None:
        room = torch.empty(max(1, before.needs), dtype=torch.uint8, pin_memory=self.lane.pinned, device="cpu")
        self._recording = Recording(room, before.places)
        try:
            with _recorded(self._recording):
                self.graph = self.lane.captured(partial(work, self._seeds))
            # Not the graph, whose result may hold this piece.
            weakref.finalize(self, _wait, self.graph.wait, room).atexit = False
        except Exception as error:  # without a graph the work raises what it has to
            self._recording.end()
            warnings.warn(
                f"a bucket's kernels are launched one by one, which takes the host longer, as this work cannot be "
                f"captured: {error}. Its results are the same; THINWIRE_GRAPHS=0 captures none, and says nothing",
                stacklevel=2,
            )

    def _replayed(self) -> Any:
        fills = [] if self._recording is None else self._recording.fills
        if fills:
            self.graph.wait()
        for make, place in fills:
            place.copy_(make())
        self.graph.replay()
        return self.graph.result


def _wait(wait: Callable[[], None], _room: Tensor) -> None:
    """Wait for a dropped graph's last replay, which reads the pinned room: only then may others have it."""
    wait()

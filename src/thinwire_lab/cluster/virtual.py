"""Process groups whose ranks are threads of one process: recipes run on them unchanged, without a network.

Why groups, and no stand-in for the exchanges? Everything above the network then is the library's own: buckets, payloads
and their bytes, memories, the optimizer's momentum. What is left to imitate is the network, and that is little: a
collective ends when its last rank has called it. Sums are added in the order of Gloo's ring, and so have Gloo's bits.
"""

import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import reduce
from threading import Lock
from types import MappingProxyType
from typing import Any, TypeVar
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from thinwire.collectives import communication_thread, thread

T = TypeVar("T")
Tensors = Sequence[Tensor]
Way = tuple[int, int, int]
"""Of a message: source, destination and tag."""

_SEGMENT = 1 << 20  # bytes: gloo::AllreduceOptions::kMaxSegmentSize
_REDUCE: Mapping[Any, Callable[[Tensor, Tensor], Tensor]] = MappingProxyType(
    {
        dist.ReduceOp.SUM: torch.add,
        dist.ReduceOp.MAX: torch.maximum,
        dist.ReduceOp.MIN: torch.minimum,
        dist.ReduceOp.BOR: torch.bitwise_or,
    }
)


@dataclass
class _Call:
    """One collective: what each rank that has called it hands in, and waits for."""

    kind: str
    parts: dict[int, Tensors] = field(default_factory=dict)
    futures: "dict[int, Future[Tensors]]" = field(default_factory=dict)


class Meeting:
    """Where ranks meet: the n-th collective of one is the n-th of all."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._lock = Lock()
        self._numbers = [0] * size
        self._calls: dict[int, _Call] = {}
        self._mail: dict[tuple[Way, bool], deque[tuple[Tensor, Future[Tensors]]]] = defaultdict(deque)
        self._error: BaseException | None = None

    def join(self, rank: int, kind: str, part: Tensors, work: Callable[[list[Tensors]], None]) -> dist.Work:
        """Hand in a rank's tensors. The last rank does the `work` on those of all ranks, in place."""
        _settle(part)
        future = _future(part)
        with self._lock:
            self._check()
            number = self._numbers[rank]
            self._numbers[rank] += 1
            call = self._calls.setdefault(number, _Call(kind))
            if call.kind != kind:
                raise RuntimeError(f"rank {rank} calls {kind} where another rank has called {call.kind}")
            call.parts[rank], call.futures[rank] = part, future
            if last := len(call.parts) == self.size:
                del self._calls[number]
        if last:
            with torch.no_grad():
                work([call.parts[each] for each in range(self.size)])
            for each in range(self.size):
                call.futures[each].set_result(call.parts[each])
        return _work(future)

    def post(self, way: Way, tensor: Tensor, *, sends: bool) -> dist.Work:
        """Hand in a message, or the place for one."""
        _settle([tensor])
        future = _future([tensor])
        with self._lock:
            self._check()
            waiting = self._mail[way, not sends]
            if not waiting:
                self._mail[way, sends].append((tensor, future))
                return _work(future)
            other, theirs = waiting.popleft()
        source, target = (tensor, other) if sends else (other, tensor)
        with torch.no_grad():
            target.copy_(source)
        for done, mine in ((theirs, other), (future, tensor)):
            done.set_result([mine])
        return _work(future)

    def end(self, error: BaseException) -> None:
        """Have all who wait, and all who come, raise: a rank has failed."""
        with self._lock:
            self._error = self._error or error
            left = [future for call in self._calls.values() for future in call.futures.values()]
            left += [future for box in self._mail.values() for _, future in box]
            self._calls.clear()
            self._mail.clear()
        for future in left:
            ended: Any = _EndedError(f"another rank failed: {error}")  # torch's stub wants a result
            future.set_exception(ended)

    def _check(self) -> None:
        if self._error is not None:
            raise _EndedError(f"another rank failed: {self._error}")


class _EndedError(RuntimeError):
    """Another rank is to blame."""


_Group: Any = dist.ProcessGroup  # whose stubs want every old overload of what is overridden


class VirtualGroup(_Group):  # type: ignore[misc]  # so its base has no type
    """A rank's group. `payload_bytes`: what the rank has handed to collectives and messages, each payload once.

    That leaves out how often a payload travels, which depends on the exchange; maxima, by which replicas only ask each
    other; and lists, by which they tell each other things. `twin` is the group of the rank's communication thread.
    """

    def __init__(self, rank: int, meeting: Meeting, twin: "VirtualGroup | None" = None) -> None:
        super().__init__(rank, meeting.size)
        self._place, self._meeting, self.twin, self._bytes = rank, meeting, twin, 0

    @property
    def payload_bytes(self) -> int:
        """Those of its twin, too."""
        return self._bytes + (self.twin.payload_bytes if self.twin else 0)

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """Return one that is nobody's."""
        return "virtual"

    def allreduce(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        """Reduce tensors in place."""
        op = opts.reduceOp.op
        self._bytes += 0 if op == dist.ReduceOp.MAX else sum(x.nbytes for x in tensors)
        return self._meeting.join(self._place, f"all-reduce {op}", tensors, lambda parts: _all_reduce(parts, op))

    def all_gather_single(self, out: Tensor, mine: Tensor, opts: Any = None) -> dist.Work:
        """Gather equal tensors in one."""
        self._bytes += mine.nbytes
        return self._meeting.join(self._place, "all-gather", [out, mine], _all_gather_single)

    _allgather_base = all_gather_single  # its name before torch 2.13

    def allgather(self, out: Sequence[Tensors], mine: Tensors, opts: Any = None) -> dist.Work:
        """Gather equal tensors in a list, whose bytes do not count."""
        return self._meeting.join(self._place, "all-gather of a list", [*out[0], mine[0]], _all_gather)

    def broadcast(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        """Give every rank the root's."""
        root = opts.rootRank
        return self._meeting.join(self._place, f"broadcast of {root}", tensors, lambda parts: _broadcast(parts, root))

    def send(self, tensors: Tensors, to: int, tag: int) -> dist.Work:
        """Send a tensor."""
        self._bytes += tensors[0].nbytes
        return self._meeting.post((self._place, to, tag), tensors[0], sends=True)

    def recv(self, tensors: Tensors, source: int, tag: int) -> dist.Work:
        """Receive a tensor."""
        return self._meeting.post((source, self._place, tag), tensors[0], sends=False)


def on_ranks(size: int, work: Callable[[VirtualGroup], T]) -> list[T]:
    """Run `work` on so many ranks, each a thread, and return their results. Raises what the first to fail raised."""
    with _groups(size) as (groups, meetings), ThreadPoolExecutor(size) as pool:

        def guarded(group: VirtualGroup) -> T:
            try:
                return work(group)
            except BaseException as error:
                for meeting in meetings:
                    meeting.end(error)
                raise

        done = [pool.submit(guarded, group) for group in groups]
    errors = [error for each in done if (error := each.exception()) is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, _EndedError)):
        raise error
    return [each.result() for each in done]


@contextmanager
def _groups(size: int) -> Iterator[tuple[list[VirtualGroup], tuple[Meeting, Meeting]]]:
    """Make a group for each rank, with its communication thread, and have torch know them by name."""
    meeting, apart = Meeting(size), Meeting(size)
    groups = [VirtualGroup(rank, meeting, VirtualGroup(rank, apart)) for rank in range(size)]
    world: Any = dist.distributed_c10d._world
    known = [*groups, *(each.twin for each in groups if each.twin)]
    world.pg_map.update(dict.fromkeys(known, ("virtual", None)))
    world.pg_group_ranks.update({group: {rank: rank for rank in range(size)} for group in known})
    with mock.patch.object(thread, "same_group", lambda group: group.twin):  # torch cannot make such a group
        threads = [communication_thread(group) for group in groups]
    try:
        yield groups, (meeting, apart)
    finally:
        for each in threads:
            each.close()
        for group in known:
            del world.pg_map[group], world.pg_group_ranks[group]


def ring_sum(parts: Tensors) -> None:
    """Sum flat tensors of equal length into all of them, with the bits of Gloo's ring all-reduce.

    Rank c ends up with chunk c, which has come to it down the ranks: from c − 1 over c − 2 and so on.
    """
    size, numel = len(parts), parts[0].numel()
    length = _chunk(numel, parts[0].element_size(), size)
    for c in range(size):
        chunks = [part[c * length : (c + 1) * length] for part in parts]
        total = reduce(torch.add, [chunks[(c - 1 - hop) % size] for hop in range(size)])
        for chunk in chunks:
            chunk.copy_(total)


def _chunk(numel: int, itemsize: int, size: int) -> int:
    """Return how many elements of an all-reduce end up with one rank: a whole number of segments."""
    longest = itemsize * max(1, _SEGMENT // itemsize)
    segments = max(math.ceil(numel * itemsize / longest), 2 * size)
    segments = math.ceil(segments / size) * size
    segment = math.ceil(math.ceil(numel * itemsize / segments) / itemsize)
    return segments // size * segment


def _all_reduce(parts: Sequence[Tensors], op: Any) -> None:
    for tensors in zip(*parts, strict=True):
        if op == dist.ReduceOp.SUM:
            ring_sum([x.view(-1) for x in tensors])
            continue
        total = reduce(_REDUCE[op], tensors)
        for x in tensors:
            x.copy_(total)


def _all_gather_single(parts: Sequence[Tensors]) -> None:
    whole = torch.cat([mine.view(-1) for _, mine in parts])
    for out, _ in parts:
        out.view(-1).copy_(whole)


def _all_gather(parts: Sequence[Tensors]) -> None:
    for *outs, _ in parts:
        for out, (*_, theirs) in zip(outs, parts, strict=True):
            out.copy_(theirs)


def _broadcast(parts: Sequence[Tensors], root: int) -> None:
    for tensors in parts:
        for x, y in zip(tensors, parts[root], strict=True):
            x.copy_(y)


def _future(tensors: Tensors) -> "Future[Tensors]":
    return Future(devices=list({x.device for x in tensors if x.is_cuda}) or None)


def _settle(tensors: Tensors) -> None:
    """Have a GPU finish what it was told, because another rank's thread, with another stream, goes on from there."""
    if any(x.is_cuda for x in tensors):
        torch.cuda.current_stream().synchronize()


def _work(future: "Future[Tensors]") -> dist.Work:
    return torch._C._distributed_c10d._create_work_from_future(future)  # type: ignore[attr-defined]  # not in stubs

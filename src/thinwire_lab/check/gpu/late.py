"""Do means wait for what has not arrived yet? A group whose collectives end late, on a stream that nobody else uses.

NCCL's collectives end on a stream of their own, some microseconds later. Here they end milliseconds later, and until
then the place for what arrives holds rubbish. A recipe that looks too early gets other means than with a group whose
collectives are over at once.
"""

import gc
import math
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.testing._internal.distributed.fake_pg import FakeStore

from thinwire.collectives import groups, thread
from thinwire.errors import PayloadError
from thinwire.kernels import memory, replay
from thinwire.reducer import Reducer
from thinwire_lab.check.findings import Wrong
from thinwire_lab.check.gpu.buckets import WORLD, Case, Work
from thinwire_lab.check.gpu.counting import forget, patched, synchronize

_CYCLES = 20_000_000  # some ten milliseconds of a GPU
_RANK = 1  # not the root, which would have to invent what it is sent
_AHEAD = 6  # steps after which a bucket's work is captured
_Group: Any = dist.ProcessGroup  # whose stubs want every old overload of what is overridden


class LateGroup(_Group):  # type: ignore[misc]  # so its base has no type
    """One rank of several, of which the others send what it sends. Collectives end late, or at once if `prompt`."""

    def __init__(self, device: torch.device, world: int = WORLD, *, prompt: bool = False) -> None:
        super().__init__(_RANK, world)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._prompt, self._sent = prompt, defaultdict[int, deque[Tensor]](deque)
        self.silent = False
        """Whether gathers leave what they should write to as it is."""
        self._started: SimpleQueue[tuple[threading.Event, threading.Thread] | None] = SimpleQueue()
        known: Any = dist.distributed_c10d._world  # whom torch asks
        others = (rank for rank in range(world) if rank != _RANK)
        known.pg_map[self] = "late", FakeStore()
        known.pg_group_ranks[self] = dict(enumerate((_RANK, *others)))
        groups._twins[self] = self  # rounds may go on in it

    def close(self) -> None:
        """Make torch and the communication thread forget it."""
        known: Any = dist.distributed_c10d._world
        for held in (known.pg_map, known.pg_group_ranks, groups._twins):
            held.pop(self, None)
        if (found := thread._open.pop(self, None)) is not None:
            found.close()

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """Return one that is nobody's."""
        return "late"

    def _get_backend(self, _: torch.device) -> object:
        """Return one that sends messages one by one: torch 2.14 asks for it."""
        return object()

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> dist.Work:
        """Leave a tensor as it is."""
        (x,) = tensors
        sent = self._held(x.clone())
        x.view(torch.uint8).fill_(255)
        return self._ended(x, lambda: x.copy_(sent))

    def all_gather_single(self, out: Tensor, mine: Tensor, opts: Any = None) -> dist.Work:
        """Gather equal tensors, which are read late, too."""
        if self.silent:
            return self._ended(out, lambda: None)
        out.view(torch.uint8).fill_(255)
        return self._ended(out, lambda: out.view(self.size(), -1).copy_(mine.view(1, -1)))

    _allgather_base = all_gather_single  # its name before torch 2.13

    def all_to_all_single(
        self, out: Tensor, mine: Tensor, _: Sequence[int], sizes: Sequence[int], *__: Any
    ) -> dist.Work:
        """Take from each rank what this one sends to itself, which is read late, too."""
        out.view(torch.uint8).fill_(255)
        own = mine.split(list(sizes))[self.rank()]
        return self._ended(out, lambda: out.view(self.size(), -1).copy_(own.view(1, -1)))

    alltoall_base = all_to_all_single

    def send(self, tensors: Sequence[Tensor], to: int, tag: int) -> dist.Work:
        """Send a tensor, which is read late."""
        self._sent[to] += map(self._held, tensors)
        return _Waits(lambda: None)

    def recv(self, tensors: Sequence[Tensor], source: int, tag: int) -> dist.Work:
        """Take from a rank what it was sent, late."""
        (x,) = tensors
        x.view(torch.uint8).fill_(255)
        return _Waits(lambda: self._ended(x, partial(x.copy_, self._sent[source].popleft())).wait())

    def arrive(self, *awaited: "Future[Any]") -> None:
        """On a CPU, have collectives end, one after another, until what waits for them is done."""
        for future in awaited:
            future.add_done_callback(lambda _: self._started.put(None))
        for _ in awaited:
            while (collective := self._started.get()) is not None:
                over, thread = collective
                over.set()
                thread.join()

    def _held(self, x: Tensor) -> Tensor:
        if self._stream is not None:
            x.record_stream(self._stream)
        return x

    def _ended(self, x: Tensor, work: Callable[[], object]) -> dist.Work:
        future: Future[list[Tensor]] = Future(devices=[x.device] if x.is_cuda else None)
        if self._prompt:
            work()
            future.set_result([x])
        elif self._stream is None:
            over = threading.Event()
            later = threading.Thread(target=self._later, args=(over, work, future, x))
            later.start()
            self._started.put((over, later))
        else:
            self._stream.wait_stream(torch.cuda.current_stream(x.device))
            with torch.cuda.stream(self._stream):
                torch.cuda._sleep(_CYCLES)
                work()
                future.set_result([x])
        return torch._C._distributed_c10d._create_work_from_future(future)  # type: ignore[attr-defined]  # not in stubs

    @staticmethod
    def _later(over: threading.Event, work: Callable[[], object], future: "Future[list[Tensor]]", x: Tensor) -> None:
        over.wait()
        with torch.no_grad():
            work()
        future.set_result([x])


class _Waits(dist.Work):
    """A message, which is on its way once somebody waits: by then what it meets was posted, too."""

    def __init__(self, wait: Callable[[], object]) -> None:
        super().__init__()
        self._wait = wait

    def wait(self, timeout: Any = None) -> bool:
        """Have it arrive, and wait until it has."""
        self._wait()
        return True


def check_freed(case: Case, device: torch.device, steps: int = 20) -> None:
    """Compare captured means with others while another bucket's captures come and go. Raises Wrong.

    cuBLAS keeps the memory that it works in with a stream, and torch gives that up with a capture.
    """
    plain, kept = Work(case, device), Work(case, device)
    kept.gradients = plain.gradients
    for step in range(steps):
        passing = Work(case, device)
        for _ in range(_AHEAD if step % 4 == 3 else 0):
            passing.prepare()
            passing.step()
        del passing
        gc.collect()
        rubbish = [torch.full((1 << 23,), math.nan, device=device) for _ in range(8 if device.type == "cuda" else 0)]
        plain.gradients.normal_()
        for work in (plain, kept):
            work.prepare()
            with patched((replay, "LANES", {})) if work is plain else nullcontext():
                work.step()
        _compare(kept, plain, step)
        del rubbish


def check_constants(case: Case, device: torch.device, steps: int = 4) -> None:
    """Compare a bucket's means with others whose constants are copied slowly, for two streams at once. Raises Wrong."""
    plain, *both = works = [Work(case, device) for _ in range(3)]
    streams = [torch.cuda.Stream(device) if device.type == "cuda" else None for _ in both]
    for work in both:
        work.gradients = plain.gradients
    for step in range(steps):
        plain.gradients.normal_()
        for work in works:
            work.prepare()
        with patched((replay, "LANES", {})):  # whatever is captured has met its constants before
            plain.step()
            synchronize(device)
            forget()
            with patched((memory, "_sent", _slowly)):
                for work, stream in zip(both, streams, strict=True):
                    with torch.cuda.stream(stream):
                        work.step()
        synchronize(device)
        for work in both:
            _compare(work, plain, step)


def _slowly(x: Tensor, device: torch.device) -> Tensor:
    """Copy as `memory._sent` does, but late: until then zeros are there, with which nothing writes out of bounds."""
    there = torch.zeros_like(x, device=device)
    if device.type == "cuda":
        torch.cuda._sleep(_CYCLES)
        x = x.pin_memory()
    return there.copy_(x, non_blocking=True)


def check_aborted(case: Case, device: torch.device) -> None:
    """Have an all-gather leave what the step before received, as one that was aborted. Raises Wrong if that passes."""
    work = Work(case, device)
    with closing(LateGroup(device, prompt=True)) as work.group:
        for work.group.silent in (False, False, True):
            work.gradients.normal_()
            work.prepare()
            try:
                work.step()
                work.verdict.read()
            except PayloadError:
                if work.group.silent:
                    return
                raise
    raise Wrong("what was received a step before has passed for what did not arrive")


def _compare(found: Work, expected: Work, step: int) -> None:
    if not torch.equal(found.flat, expected.flat):
        off = (found.flat - expected.flat).abs()
        raise Wrong(f"step {step}: {int((off != 0).sum())} elements of the mean differ, by up to {float(off.max())}")


def check_late(case: Case, device: torch.device, steps: int = 14, make: Callable[[], Reducer] | None = None) -> None:
    """Compare a recipe's means with those of a group without delay, where nothing is captured. Raises Wrong.

    Another bucket is captured earlier, and replayed before the first one's collective has ended.
    """
    plain, late, other = Work(case, device), Work(case, device), Work(case, device)
    late.gradients = plain.gradients
    if make is not None:
        plain.recipe, late.recipe, other.recipe = make(), make(), make()
    with closing(LateGroup(device, prompt=True)) as plain.group, closing(LateGroup(device)) as late.group:
        other.group = late.group
        for step in range(-_AHEAD if steps > _AHEAD else 0, steps):
            plain.gradients.normal_()
            works = [late, other] if step >= 0 else [other]
            for work in (plain, *works):
                work.prepare()
            futures = [work.start() for work in works]
            if device.type == "cpu":
                late.group.arrive(*futures)
            for work, future in zip(works, futures, strict=True):
                future.wait()
                work.end()
            if step < 0:
                continue
            with patched((replay, "LANES", {})):
                plain.step()
            _compare(late, plain, step)

"""The communication thread, which runs exchanges of several rounds in the order they were started.

Why a thread? DDP's hook must not block, and collectives started in callbacks would start in a different order on each
rank. The thread has its own process group, so its messages never mix with those of the group it serves.
"""

import atexit
import os
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar, cast, final

import torch
from torch.futures import Future

from thinwire.collectives.exit import patience_ends
from thinwire.collectives.groups import Group, end_group, same_group
from thinwire.collectives.queued import Queued, fulfil
from thinwire.kernels.streams import stream_of

_T = TypeVar("_T")
_Job = Callable[[], None]


@final
class Worker:
    """A thread that works through submitted jobs, in order. It ends with its owner."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        # A daemon, because at exit, waiting for a lost peer would last until the group's timeout.
        self.thread = threading.Thread(target=_serve, args=(self._jobs,), daemon=True, name=name)
        self.thread.start()
        _workers.add(self)
        weakref.finalize(self, self._jobs.put, None)
        _threads.add(self.thread)

    def submit(self, work: Callable[[], _T], device: torch.device) -> "Future[_T]":
        """Queue `work`, whose result holds tensors on `device`. There it comes after what is queued here by now."""
        future: Any = Future()
        if device.type == "cuda":
            future = Queued(stream_of(device, "exchange"))
            work = partial(_after, torch.cuda.current_stream(device).record_event(), future.stream, work)
        self._jobs.put(partial(fulfil, future, work))
        return cast("Future[_T]", future)

    def close(self) -> None:
        """Take no more work."""
        self._jobs.put(None)


@final
class CommunicationThread:
    """A thread for exchanges, with a new process group of the same ranks as `group`."""

    def __init__(self, group: Group) -> None:
        self._group = same_group(group)
        self._worker = Worker("thinwire-communication")
        self._process = os.getpid()

    def submit(self, work: Callable[[Group], _T], device: torch.device) -> "Future[_T]":
        """Queue `work`, which will be called with the thread's group. Its result holds tensors on `device`."""
        return self._worker.submit(partial(work, self._group), device)

    def close(self) -> None:
        """Take no more work."""
        self._worker.close()

    def end(self) -> None:
        """If all work is done, release the group, which ends its threads. Otherwise leave it as it is."""
        # In a forked child there are no threads to end, and the group would wait for them.
        if self._process == os.getpid() and not self._worker.thread.is_alive():
            end_group(self._group)
            del self._group


def communication_thread(group: Group) -> CommunicationThread:
    """Return the communication thread of `group`; the first call is a collective, in the same order on every rank."""
    if (found := _open.get(group)) is None:
        found = _open[group] = CommunicationThread(group)
    return found


_open: weakref.WeakKeyDictionary[Group, CommunicationThread] = weakref.WeakKeyDictionary()
_workers: weakref.WeakSet[Worker] = weakref.WeakSet()
_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()  # also those whose worker is gone


@atexit.register
def _end_all() -> None:
    """End all threads before the interpreter ends; `exit` says why."""
    for worker in list(_workers):
        worker.close()
    for running in list(_threads):
        running.join(max(0.0, patience_ends() - time.monotonic()))
    for thread in list(_open.values()):
        thread.end()


def _serve(jobs: "SimpleQueue[_Job | None]") -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # or what it holds would live until the next job


def _after(ready: Any, stream: Any, work: Callable[[], _T]) -> _T:
    stream.wait_event(ready)
    return work()

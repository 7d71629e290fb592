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
from queue import SimpleQueue
from typing import Any, TypeVar, final

import torch
from torch.futures import Future

from thinwire.collectives.exit import patience_ends
from thinwire.collectives.groups import Group, end_group, same_group

_T = TypeVar("_T")
_Job = tuple[Callable[[Group], Any], Group, "Future[Any]"]


@final
class CommunicationThread:
    """A thread that works through submitted jobs, on a new process group with the same ranks as `group`."""

    def __init__(self, group: Group) -> None:
        self._group = same_group(group)
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._process = os.getpid()
        # A daemon, because at exit, waiting for a lost peer would last until the group's timeout.
        self._thread = threading.Thread(target=_serve, args=(self._jobs,), daemon=True, name="thinwire-communication")
        self._thread.start()
        _threads.add(self._thread)
        weakref.finalize(self, self._jobs.put, None)

    def submit(self, work: Callable[[Group], _T], device: torch.device) -> "Future[_T]":
        """Queue `work`, which will be called with the thread's group. Its result holds tensors on `device`."""
        future: Future[_T] = Future(devices=[device] if device.type == "cuda" else [])
        self._jobs.put((_after_current_stream(work, device), self._group, future))
        return future

    def close(self) -> None:
        """Take no more work."""
        self._jobs.put(None)

    def end(self) -> None:
        """If all work is done, release the group, which ends its threads. Otherwise leave it as it is."""
        # In a forked child there are no threads to end, and the group would wait for them.
        if self._process == os.getpid() and not self._thread.is_alive():
            end_group(self._group)
            del self._group


def communication_thread(group: Group) -> CommunicationThread:
    """Return the communication thread of `group`.

    The first call for a group is a collective: make it in the same order on every rank.
    """
    found = _open.get(group)
    if found is None:
        found = _open[group] = CommunicationThread(group)
    return found


_open: weakref.WeakKeyDictionary[Group, CommunicationThread] = weakref.WeakKeyDictionary()
_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()  # also those whose owner is gone


@atexit.register
def _end_all() -> None:
    """End all communication threads before the interpreter ends; `exit` says why."""
    threads = list(_open.values())
    for thread in threads:
        thread.close()
    for running in list(_threads):
        running.join(max(0.0, patience_ends() - time.monotonic()))
    for thread in threads:
        thread.end()


def _serve(jobs: "SimpleQueue[_Job | None]") -> None:
    while (job := jobs.get()) is not None:
        _run(*job)
        del job  # or the group would live until the next job


def _run(work: Callable[[Group], Any], group: Group, future: "Future[Any]") -> None:
    try:
        result = work(group)
    except Exception as error:
        future.set_exception(error)
    else:
        future.set_result(result)


def _after_current_stream(work: Callable[[Group], _T], device: torch.device) -> Callable[[Group], _T]:
    """On a GPU, make `work` wait for everything already queued on the caller's stream."""
    if device.type != "cuda":
        return work
    ready = torch.cuda.current_stream(device).record_event()

    def ordered(group: Group) -> _T:
        torch.cuda.current_stream(device).wait_event(ready)
        return work(group)

    return ordered

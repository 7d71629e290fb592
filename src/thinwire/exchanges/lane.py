"""A thread and a process group on which exchanges of several rounds run, in the order in which they were started.

DDP's hook may not block, and a collective issued from a callback would be issued in an order that differs by rank.
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

from thinwire.exchanges.compat import Group, end_group, same_group
from thinwire.exchanges.settle import patience_ends

_T = TypeVar("_T")
_Job = tuple[Callable[[Group], Any], Group, "Future[Any]"]


@final
class Lane:
    """Work on a group with the same ranks as `group`, so that it never mixes with what others send on that one."""

    def __init__(self, group: Group) -> None:
        self._group = same_group(group)
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._process = os.getpid()
        # A daemon: at exit, waiting for a peer that is gone would take until the group's timeout.
        self._thread = threading.Thread(target=_serve, args=(self._jobs,), daemon=True, name="thinwire-lane")
        self._thread.start()
        _threads.add(self._thread)
        weakref.finalize(self, self._jobs.put, None)

    def submit(self, work: Callable[[Group], _T], device: torch.device) -> "Future[_T]":
        """Queue `work`, which gets the lane's group. Its result holds tensors on `device`."""
        future: Future[_T] = Future(devices=[device] if device.type == "cuda" else [])
        self._jobs.put((_after_current_stream(work, device), self._group, future))
        return future

    def close(self) -> None:
        """Take no more work."""
        self._jobs.put(None)

    def end(self) -> None:
        """Once all work is done, let go of the group, which ends its threads; otherwise leave it as it is."""
        # In a forked child there are no threads to end, and the group would wait for them.
        if self._process == os.getpid() and not self._thread.is_alive():
            end_group(self._group)
            del self._group


def lane(group: Group) -> Lane:
    """Return the lane of `group`. A collective where it is the first time; call it in the same order on every rank."""
    found = _lanes.get(group)
    if found is None:
        found = _lanes[group] = Lane(group)
    return found


_lanes: weakref.WeakKeyDictionary[Group, Lane] = weakref.WeakKeyDictionary()
_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()  # also of lanes that are gone


@atexit.register
def _end_all() -> None:
    """Bring all lanes to their end before the interpreter comes to its own; see `settle`."""
    lanes = list(_lanes.values())
    for open_lane in lanes:
        open_lane.close()
    for thread in list(_threads):
        thread.join(max(0.0, patience_ends() - time.monotonic()))
    for closed_lane in lanes:
        closed_lane.end()


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
    """Let what was queued on this thread's stream come first, on a GPU."""
    if device.type != "cuda":
        return work
    ready = torch.cuda.current_stream(device).record_event()

    def ordered(group: Group) -> _T:
        torch.cuda.current_stream(device).wait_event(ready)
        return work(group)

    return ordered

"""The group that torchrun has made, in place of workers of our own."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

from thinwire.bench.training import Emit


def in_group() -> bool:
    """Whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def is_first() -> bool:
    """Whether this process is the one to speak."""
    return not in_group() or os.environ["RANK"] == "0"


def world_size() -> int:
    """Return the size of the group that torchrun made."""
    return int(os.environ["WORLD_SIZE"])


class ThisGroup:
    """Runs every job in this very process, one of the group's; each rank sees its own events as those of rank 0."""

    label = "UNTHROTTLED: the network that torchrun was started on, as it is"
    throttled = False

    def __init__(self, handler: Callable[[dict[str, Any], Emit], None]) -> None:
        self._handler = handler

    def run(self, job: dict[str, Any]) -> Iterator[tuple[int, dict[str, Any]]]:
        """Run the job and yield its events as they come."""
        events: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
        with ThreadPoolExecutor(1) as thread:
            done: Future[None] = thread.submit(self._handler, job, events.put)
            done.add_done_callback(lambda _: events.put(None))
            while (event := events.get()) is not None:
                yield 0, event
            done.result()

    def throttle(self, on: bool) -> None:
        """The network is not ours to limit."""

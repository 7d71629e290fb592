"""Worker processes on this machine, joined by links of limited rate."""

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from operator import itemgetter
from signal import Signals
from typing import Self

from thinwire_lab.cluster.link import Rate
from thinwire_lab.cluster.supervisor import Setup
from thinwire_lab.cluster.worker import Channel, HungUp, Message, environment
from thinwire_lab.inputs import BadInput

_PATIENCE = 1.0  # seconds for a supervisor to end its workers
_MOST_WORKERS = 254  # as many as a star has addresses for
_GRACE = 0.3  # seconds for a death to be noticed


class WorkerDied(RuntimeError):  # noqa: N818 - it reads better where it is raised and caught
    """A worker ended, or its handler raised; all workers are gone now.

    reason: the traceback, or how the process ended. stderr_tail: the last 16 kB that it printed, traceback included.
    """

    def __init__(self, rank: int, reason: str, stderr_tail: str) -> None:
        super().__init__(f"worker {rank} died: {reason.strip().splitlines()[-1]}")
        self.rank, self.reason, self.stderr_tail = rank, reason, stderr_tail


class SupervisorDied(RuntimeError):  # noqa: N818 - it reads better where it is raised and caught
    """The supervisor process is gone, and so are its workers."""

    def __init__(self, printed: str) -> None:
        super().__init__(f"the supervisor of the workers died\n{printed}".strip())


class Processes:
    """A supervisor and, once it has sent ``ready``, its workers. However this process ends, they end with it."""

    def __init__(self, world: int, rate: Rate | None, handler: str, *, namespaces: bool, island: int) -> None:
        pairs = [socket.socketpair() for _ in range(world + 1)]
        self.control, *self.workers = (Channel(ours) for ours, _ in pairs)
        control, *workers = (theirs.fileno() for _, theirs in pairs)
        setup = Setup(
            handler=handler,
            bits_per_second=None if rate is None else rate.bits_per_second,
            latency=0.0 if rate is None else rate.latency,
            namespaces=namespaces,
            island=island,
            control=control,
            workers=workers,
        )
        command = [sys.executable, "-Pu", "-X", "faulthandler", "-m", "thinwire_lab.cluster.supervisor"]
        self._supervisor = subprocess.Popen(
            [*command, json.dumps(asdict(setup))],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=[control, *workers],
            env=os.environ | environment(max(1, (os.cpu_count() or 1) // world)),
            start_new_session=True,  # ^C then reaches this process only, and all others can be killed together
        )
        for _, theirs in pairs:
            theirs.close()

    def end(self) -> str:
        """End them all, whatever they are doing, and return what the supervisor printed."""
        with suppress(HungUp):
            self.control.finish()
            while self.control.is_ready(_PATIENCE):
                self.control.receive()
        with suppress(ProcessLookupError, PermissionError):  # if all are gone, macOS says "not permitted"
            os.killpg(self._supervisor.pid, signal.SIGKILL)  # we have not waited for it, so the id is still theirs
        _, printed = self._supervisor.communicate()
        for channel in (self.control, *self.workers):
            channel.close()
        return printed.decode(errors="replace")


class Cluster:
    """Within `with`, `world` processes that run ``module:function`` as `handler(job, emit)`.

    Each has its own link, limited to `rate` each way unless that is None; `label` then has the ping that was measured,
    if `rate` has a latency. With `island` above 1, so many neighbours in
    the order of ranks share such a link to all others, and nothing limits what passes between them. Without network
    namespaces (unavailable, or `namespaces` false) all share the loopback interface. Once started, `throttled` says
    whether the links are limited, and `label` how fast they are, or why they are not limited. Workers are forked and
    import from the same places as this process; RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, GLOO_SOCKET_IFNAME and
    OMP_NUM_THREADS are set for torch.
    """

    label = "not started"
    throttled = False

    def __init__(
        self, world: int, rate: Rate | None, handler: str, *, namespaces: bool = True, island: int = 1
    ) -> None:
        if os.name != "posix":
            raise BadInput("workers on one machine need Linux or macOS; elsewhere start them with torchrun")
        if not 1 <= world <= _MOST_WORKERS:
            raise BadInput(f"{world} workers: expected 1 to {_MOST_WORKERS}")
        if island < 1 or world % island:
            raise BadInput(f"{world} workers cannot be divided into islands of {island}")
        self._world, self._rate, self._namespaces, self._island = world, rate, namespaces, island
        self._start = partial(Processes, world, rate, handler, namespaces=namespaces, island=island)
        self._processes: Processes | None = None
        self._inbox: deque[Message] = deque()
        self._busy: set[int] = set()
        self._raised = (-1, "")

    def __enter__(self) -> Self:
        """Start the workers; raises SupervisorDied."""
        self._processes = self._start()
        try:
            self._settle(self._processes)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """End all processes, whatever they are doing."""
        if self._processes is not None:
            self._end(self._processes)

    def throttle(self, on: bool) -> None:
        """Lift the links' limit, or put it back; does nothing where they have none. Raises as `run` does."""
        self._running()
        if self.throttled:
            self.limit(self._rate if on else None)

    def limit(self, rate: Rate | None) -> None:
        """Limit the links to another rate, or lift the limit, also while a job runs. Raises as `run` does.

        The latency stays, unless lifted. Does nothing where workers have no links of their own.
        """
        processes = self._running()
        with suppress(HungUp):  # to be found out by listening
            processes.control.send({"limit": None if rate is None else rate.bits_per_second})
        self._hear(processes)

    def run(self, job: Message) -> Iterator[tuple[int, Message]]:
        """Send the job to every worker, then yield (rank, event) as events come, until all are done.

        Job and events must fit into JSON. Raises RuntimeError if an earlier job is not done or the cluster is not open;
        while iterating, WorkerDied or SupervisorDied.
        """
        processes = self._running()
        if self._busy:
            raise RuntimeError("the workers are not done with an earlier job")
        self._busy = set(range(self._world))
        for worker in processes.workers:
            with suppress(HungUp):  # the supervisor will report it
                worker.send(job)
        return self._events(processes)

    def _settle(self, processes: Processes) -> None:
        reason = None if self._namespaces else "not wanted"
        while "ready" not in (message := self._hear(processes)):
            reason = message["unavailable"]
        self.throttled = reason is None and self._rate is not None
        whose = "worker, each way" if self._island == 1 else "island, each way; unthrottled within"
        speed = f"{self._rate} per {whose}" if self.throttled else "unthrottled"
        if (ping := message["ping"]) is not None:
            speed += f"; a ping takes {1e3 * ping:.1f} ms"
        self.label = speed if reason is None else f"{speed} (no network namespaces: {reason})"

    def _running(self) -> Processes:
        if self._processes is None:
            raise RuntimeError("the cluster is not open")
        return self._processes

    def _end(self, processes: Processes) -> str:
        self._processes = None
        return processes.end()

    def _events(self, processes: Processes) -> Iterator[tuple[int, Message]]:
        with selectors.DefaultSelector() as selector:
            selector.register(processes.control, selectors.EVENT_READ)
            for rank, worker in enumerate(processes.workers):
                selector.register(worker, selectors.EVENT_READ, rank)
            while self._busy:
                for key, _ in selector.select():
                    yield from self._listen(processes, key.data)

    def _listen(self, processes: Processes, rank: int | None) -> Iterator[tuple[int, Message]]:
        if rank is None:
            self._hear(processes)
            return
        with suppress(HungUp):  # the supervisor will report it
            for message in processes.workers[rank].receive():
                if "event" in message:
                    yield rank, message["event"]
                elif "raised" in message:
                    self._find_cause(processes, rank, message["raised"])
                else:
                    self._busy.discard(rank)

    def _find_cause(self, processes: Processes, rank: int, raised: str) -> None:
        """Raise WorkerDied for the cause: a worker may have raised only because another one ended."""
        self._raised = rank, raised
        if not processes.control.is_ready(_GRACE):
            processes.control.finish()
        self._hear(processes)

    def _hear(self, processes: Processes) -> Message:
        """Wait for the supervisor's next message; raise WorkerDied or SupervisorDied if it is the last."""
        try:
            while not self._inbox:
                self._inbox.extend(processes.control.receive())
        except HungUp:
            raise SupervisorDied(self._end(processes)) from None
        message = self._inbox.popleft()
        if "dead" in message:
            self._end(processes)
            raise self._obituary(**message)
        return message

    def _obituary(self, dead: list[tuple[int, int]], output: list[str]) -> WorkerDied:
        rank, reason = self._raised
        if dead:
            rank, code = min(dead, key=itemgetter(1))  # workers killed by a signal come before those that exited
            reason = f"killed by {Signals(-code).name}" if code < 0 else f"ended with status {code}"
        return WorkerDied(rank, reason, output[rank])

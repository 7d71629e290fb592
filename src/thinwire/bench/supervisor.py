"""Starts the workers of a cluster, each on a link of its own if possible, and ends them all when one ends.

`thinwire.bench.cluster` runs this as ``python -m thinwire.bench.supervisor SETUP``, and hangs up to end it.
"""

import json
import os
import selectors
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from thinwire.bench.channel import Channel, HungUp
from thinwire.bench.link import INTERFACE_VARIABLE, Rate
from thinwire.bench.serve import die_with, serve
from thinwire.bench.star import INTERFACE, Star, Unavailable, address

_PORT = 29500
_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
_LOOK_AFTER = 0.1  # seconds between looks at whether all workers live
_OUTPUT_KEPT = 16_384  # bytes of each worker's latest
_UNAVAILABLE = 3  # exit status


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What to start, as JSON on the command line; `control` and `workers` are descriptors of sockets."""

    handler: str
    bits_per_second: int | None
    namespaces: bool
    control: int
    workers: list[int]

    @property
    def rate(self) -> Rate | None:
        """The rate of each link."""
        return None if self.bits_per_second is None else Rate(self.bits_per_second)


@dataclass
class Worker:
    """A worker process, and the latest it printed into a pipe."""

    rank: int
    process: int
    pipe: int
    output: bytes = b""

    def read(self) -> bool:
        """Wait for output and keep the tail; false when there will be no more."""
        data = os.read(self.pipe, 1 << 16)
        self.output = (self.output + data)[-_OUTPUT_KEPT:]
        return bool(data)

    def exit_code(self, *, wait: bool) -> int | None:
        """Return the exit status, negative for a signal, or None while it runs."""
        process, status = os.waitpid(self.process, 0 if wait else os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if process else None


class Supervisor:
    """Watches over the workers from their start to their end."""

    def __init__(self, setup: Setup, control: Channel, star: Star | None) -> None:
        self._setup, self._control, self._star = setup, control, star
        self._workers = list(_start(setup, star))
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ, self._obey)
        for worker in self._workers:
            self._selector.register(worker.pipe, selectors.EVENT_READ, worker.read)
        control.send({"ready": True})

    def run(self) -> None:
        """Do as told until a worker ends or control hangs up; then end everything, this process included."""
        dead: dict[int, int] = {}
        with suppress(HungUp):
            while not (dead := dict(self._dead())):
                self._attend(_LOOK_AFTER)
        self._end([worker for worker in self._workers if worker.rank not in dead])
        with suppress(HungUp):
            self._control.send({"dead": list(dead.items()), "output": self._output()})
        os.killpg(0, signal.SIGKILL)  # what the workers may have started

    def _dead(self) -> Iterator[tuple[int, int]]:
        for worker in self._workers:
            code = worker.exit_code(wait=False)
            if code is not None:
                yield worker.rank, code

    def _attend(self, timeout: float) -> bool:
        ready = self._selector.select(timeout)
        for key, _ in ready:
            if not key.data():
                self._selector.unregister(key.fileobj)
        return bool(ready)

    def _obey(self) -> bool:
        for command in self._control.receive():
            if self._star is not None:
                self._star.shape(self._setup.rate if command["throttle"] else None)
            self._control.send(command)
        return True

    def _end(self, workers: list[Worker]) -> None:
        for worker in workers:
            os.kill(worker.process, signal.SIGKILL)
        for worker in workers:
            worker.exit_code(wait=True)

    def _output(self) -> list[str]:
        self._selector.unregister(self._control)
        while self._attend(0):
            pass
        return [worker.output.decode(errors="replace") for worker in self._workers]


def _start(setup: Setup, star: Star | None) -> Iterator[Worker]:
    environment = _environment(len(setup.workers), linked=star is not None)
    for rank, descriptor in enumerate(setup.workers):
        if star is not None:
            star.spokes[rank].enter()
        output, inlet = os.pipe()
        process = _fork(lambda: ...)
        ...

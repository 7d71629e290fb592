"""Starts the workers of a cluster, each on its own link if possible, and ends them all when one ends.

`local.Cluster` runs this as ``python -m thinwire_lab.cluster.supervisor SETUP``, and hangs up to end it.
"""

import json
import os
import selectors
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from thinwire_lab.cluster.link import INTERFACE_VARIABLE, LATENCY_VARIABLE, Rate
from thinwire_lab.cluster.star import INTERFACE, Star, Unavailable, address
from thinwire_lab.cluster.worker import LOOPBACK, Captured, Channel, HungUp, exit_code, fork, serve

_ON_LINKS = {"MASTER_ADDR": address(0), "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": INTERFACE}
_LOOK_AFTER = 0.1  # seconds between checks that all workers live
_UNAVAILABLE = 3  # exit status


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What to start, as JSON on the command line; `control` and `workers` are descriptors of sockets.

    `island`: how many neighbours share a link. `latency`: seconds, as in `Rate`.
    """

    handler: str
    bits_per_second: int | None
    latency: float
    namespaces: bool
    island: int
    control: int
    workers: list[int]

    def rate(self, bits_per_second: int | None) -> Rate | None:
        """Return a rate of links with this latency."""
        return None if bits_per_second is None else Rate(bits_per_second, self.latency)


class Supervisor:
    """Watches over the workers from their start to their end. `ping`: seconds that a round trip took, if measured."""

    def __init__(self, setup: Setup, control: Channel, star: Star | None, ping: float | None = None) -> None:
        self._setup, self._control, self._star = setup, control, star
        self._workers = list(_start(setup, star))
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ, self._obey)
        for worker in self._workers:
            self._selector.register(worker.pipe, selectors.EVENT_READ, worker.read)
        control.send({"ready": True, "ping": ping})

    def run(self) -> None:
        """Obey until a worker ends or control hangs up; then end everything, this process included."""
        dead: list[tuple[int, int]] = []
        with suppress(HungUp):
            while not dead:
                self._attend(_LOOK_AFTER)
                dead = self._dead()
        self._end(dead)
        with suppress(HungUp):
            self._control.send({"dead": dead, "output": self._output()})
        os.killpg(0, signal.SIGKILL)  # whatever the workers started goes too

    def _attend(self, timeout: float) -> bool:
        """Serve what is ready, and return whether anything was."""
        ready = self._selector.select(timeout)
        for key, _ in ready:
            if not key.data():
                self._selector.unregister(key.fileobj)
        return bool(ready)

    def _obey(self) -> bool:
        for command in self._control.receive():
            if self._star is not None:
                self._star.shape(self._setup.rate(command["limit"]))
            self._control.send(command)
        return True

    def _dead(self) -> list[tuple[int, int]]:
        codes = [(rank, exit_code(worker.process, wait=False)) for rank, worker in enumerate(self._workers)]
        return [(rank, code) for rank, code in codes if code is not None]

    def _end(self, dead: list[tuple[int, int]]) -> None:
        living = [worker.process for rank, worker in enumerate(self._workers) if rank not in dict(dead)]
        for process in living:
            os.kill(process, signal.SIGKILL)
        for process in living:
            exit_code(process)

    def _output(self) -> list[str]:
        self._selector.unregister(self._control)
        while self._attend(0):
            pass
        return [worker.output.decode(errors="replace") for worker in self._workers]


def _start(setup: Setup, star: Star | None) -> Iterator[Captured]:
    linked = _ON_LINKS | {LATENCY_VARIABLE: str(setup.latency)}
    common = {"WORLD_SIZE": str(len(setup.workers))} | (_on_loopback() if star is None else linked)
    for rank, descriptor in enumerate(setup.workers):
        yield Captured.fork(partial(_work, setup.handler, descriptor, common | {"RANK": str(rank)}, star))


def _work(handler: str, descriptor: int, environment: dict[str, str], star: Star | None) -> None:
    os.environ.update(environment)
    if star is not None:
        rank = int(environment["RANK"])
        os.environ[INTERFACE_VARIABLE] = star.interface(rank)
        star.enter(rank)
    serve(Channel(socket.socket(fileno=descriptor)), handler)


def _on_loopback() -> dict[str, str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": LOOPBACK}


def main() -> None:
    """Supervise, on links if they are available."""
    setup = Setup(**json.loads(sys.argv[1]))
    control = Channel(socket.socket(fileno=setup.control))
    # in a child: failing half-way spoils a process, and a forked one has the single thread that is needed
    if not setup.namespaces or exit_code(fork(lambda: _supervise_linked(setup, control))) == _UNAVAILABLE:
        Supervisor(setup, control, None).run()


def _supervise_linked(setup: Setup, control: Channel) -> None:
    try:
        star = Star(len(setup.workers), setup.rate(setup.bits_per_second), setup.island)
        ping = star.ping() if setup.latency else None
    except Unavailable as why:
        control.send({"unavailable": str(why)})
        os._exit(_UNAVAILABLE)
    Supervisor(setup, control, star, ping).run()


if __name__ == "__main__":
    main()

"""How many trips does the exchange of an outer step take? Counted on the wire, by when packets leave.

    python -m thinwire_lab.studies.outer_trips --workers 4 --link 10mbit/50ms

Each worker has a link of its own and looks at its packets through a raw socket. A trip is a burst of those that leave
with something in them: whoever waits for an answer is silent for a X
"""

import json
import os
import socket
import time
from collections import defaultdict
from itertools import pairwise
from typing import Annotated, Any, NamedTuple

import torch
import torch.distributed as dist
import typer

import thinwire as tw
from thinwire_lab import problems
from thinwire_lab.check.worker import connect
from thinwire_lab.cluster.link import LATENCY_VARIABLE, parse_rate
from thinwire_lab.cluster.local import Cluster
from thinwire_lab.cluster.star import INTERFACE
from thinwire_lab.cluster.worker import Emit
from thinwire_lab.cluster.workers import host, join_group

_PORT, _EVERY_PROTOCOL, _OUTGOING, _TCP, _TIMESTAMPS = 29400, 3, 4, 6, 35


class Packet(NamedTuple):
    """A packet: whether it left, for whom, when, and the bytes in it."""

    out: bool
    to: bytes
    when: float
    inside: int


class Tap:
    """Sees every packet of this worker's link that holds more than TCP's own headers."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_EVERY_PROTOCOL))
        self._socket.bind((INTERFACE, 0))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 24)
        self._socket.setsockopt(socket.SOL_SOCKET, _TIMESTAMPS, 1)
        self._socket.setblocking(False)

    def read(self) -> list[Packet]:
        """Return what has passed since the last reading."""
        found: list[Packet] = []
        while True:
            try:
                frame, about, _, (_, _, kind, *_) = self._socket.recvmsg(128, 64, socket.MSG_TRUNC)
            except BlockingIOError:
                return found
            ip = frame[14:]
            if len(ip) < 40 or ip[9] != _TCP:
                continue
            inside = int.from_bytes(ip[2:4]) - 4 * (ip[0] & 15) - 4 * (ip[4 * (ip[0] & 15) + 12] >> 4)
            seconds, nanoseconds = (int.from_bytes(about[0][2][i : i + 8], "little") for i in (0, 8))
            if inside:
                found.append(Packet(kind == _OUTGOING, bytes(ip[16:20]), seconds + 1e-9 * nanoseconds, inside))


def exchanges(job: dict[str, Any], emit: Emit) -> None:
    """Take outer steps of the bench's model, and emit what each exchange had on the wire."""
    join_group()
    tap, latency = Tap(), float(os.environ[LATENCY_VARIABLE])
    problem = problems.build("transformer", seed=0, data=None, scale=1.0)
    optimizer = torch.optim.AdamW(problem.model.parameters(), lr=1e-3)
    kept = None if dist.get_rank() else connect("0.0.0.0", _PORT, serve=True)
    options: dict[str, Any] = (
        {"store": f"tcp://{host(0)}:{_PORT}", "workers": dist.get_world_size()} if job["store"] else {}
    )
    handle = tw.outer(problem.model, optimizer, tw.outer_steps.sparseloco(every=job["every"]), **options)
    for step in range(job["every"] * job["steps"]):
        last = (step + 1) % job["every"] == 0
        optimizer.zero_grad()
        problem.loss(problem.model, problem.batch(step, dist.get_rank(), dist.get_world_size())).backward()
        if last:
            dist.barrier()
            time.sleep(6 * latency)  # what others still send has come
            tap.read()
        waited, began = handle.waited, time.perf_counter()
        optimizer.step()
        if last:
            taken = time.perf_counter() - began
            time.sleep(6 * latency)
            emit({"seconds": taken, "waited": handle.waited - waited} | _counted(tap.read(), latency))
    handle.remove()
    del kept


def _counted(packets: list[Packet], latency: float) -> dict[str, Any]:
    leaving = defaultdict[bytes, list[float]](list)
    for each in packets:
        if each.out:
            leaving[each.to].append(each.when)
    trips = [1 + sum(after - before > latency / 2 for before, after in pairwise(sorted(x))) for x in leaving.values()]
    ways = {way: [each.inside for each in packets if each.out == (way == "out")] for way in ("out", "in")}
    counts = {f"packets {way}": len(each) for way, each in ways.items()}
    return {"trips": max(trips, default=0)} | counts | {f"bytes {way}": sum(each) for way, each in ways.items()}


def main(
    workers: Annotated[int, typer.Option()] = 4,
    link: Annotated[str, typer.Option()] = "10mbit/50ms",
    steps: Annotated[int, typer.Option()] = 6,
    every: Annotated[int, typer.Option()] = 2,
    store: Annotated[bool, typer.Option("--store", help="Have workers find each other by a store.")] = False,
) -> None:
    """Print a line for each exchange but the first, which also compares what workers start from."""
    with Cluster(workers, parse_rate(link), f"{__name__.replace('__main__', _MODULE)}:exchanges") as cluster:
        found: dict[int, list[dict[str, Any]]] = {}
        for rank, event in cluster.run({"steps": steps, "every": every, "store": store}):
            found.setdefault(rank, []).append(event)
    for each in list(zip(*found.values(), strict=True))[1:]:
        most = dict(max(each, key=lambda event: event["trips"]))
        most |= {name: max(event[name] for event in each) for name in ("seconds", "waited")}
        print(json.dumps({key: round(x, 3) for key, x in most.items()}))


_MODULE = "thinwire_lab.studies.outer_trips"

if __name__ == "__main__":
    typer.run(main)

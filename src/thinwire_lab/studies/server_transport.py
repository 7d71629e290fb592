"""Gloo's send and recv, or our own frames? Two processes, loopback, in turns.

    python -m thinwire_lab.studies.server_transport

Prints, for each round, the bytes a second of a message of 25 MB that is answered by one byte, and the microseconds of a
round trip of 1 kB; then the median of the rounds.
"""

import multiprocessing
import socket
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from thinwire.server.frames import Kind, Wire

LARGE, SMALL, TIMES, ROUNDS = 25_000_000, 1000, 200, 7
Talk = Callable[[int, int], None]
"""Sends so many bytes, or takes in as many, and answers with so many: the same on both sides."""


def gloo(rank: int, port: int) -> Talk:
    store = dist.TCPStore("127.0.0.1", port, 2, rank == 0)  # type: ignore[attr-defined]  # torch's stubs do not export it
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    room: dict[int, torch.Tensor] = {}

    def talk(there: int, back: int) -> None:
        for nbytes, sender in ((there, 0), (back, 1)):
            x = room.setdefault(nbytes, torch.zeros(nbytes, dtype=torch.uint8))
            dist.send(x, 1) if rank == sender == 0 else dist.send(x, 0) if rank == sender else dist.recv(x, sender)

    return talk


def frames(rank: int, port: int) -> Talk:
    if rank == 0:
        with socket.create_server(("127.0.0.1", port)) as listener:
            connection, _ = listener.accept()
    else:
        connection = _connected(port)
    wire, room = Wire(connection, timeout=60.0, limits={Kind.UPDATE: LARGE, Kind.PING: 0}), memoryview(bytes(LARGE))

    def talk(there: int, back: int) -> None:
        for nbytes, sender in ((there, 0), (back, 1)):
            if rank == sender:
                wire.send(Kind.UPDATE, room[:nbytes])
            else:
                assert len(wire.receive().body) == nbytes

    return talk


def _connected(port: int) -> socket.socket:
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port))
        except ConnectionRefusedError:
            time.sleep(0.05)


def run(rank: int, ports: list[int], results: Any) -> None:
    torch.set_num_threads(1)
    talks = {"Gloo": gloo(rank, ports[0]), "frames": frames(rank, ports[1])}
    for talk in talks.values():
        talk(LARGE, 1), talk(SMALL, SMALL)
    found = []
    for _ in range(ROUNDS):
        for name, talk in talks.items():
            large, small = _seconds(talk, LARGE, 1, 4), _seconds(talk, SMALL, SMALL, TIMES)
            found.append((name, LARGE / large, small * 1e6))
    if rank == 0:
        results.put(found)


def _seconds(talk: Talk, there: int, back: int, times: int) -> float:
    start = time.perf_counter()
    for _ in range(times):
        talk(there, back)
    return (time.perf_counter() - start) / times


def _free() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def main() -> None:
    context = multiprocessing.get_context("spawn")
    results, ports = context.Queue(), [_free(), _free()]
    processes = [context.Process(target=run, args=(rank, ports, results)) for rank in range(2)]
    for each in processes:
        each.start()
    found = results.get(timeout=300)
    for name, speed, trip in found:
        print(f"{name:8} {speed / 1e9:6.2f} GB/s {trip:8.0f} µs")
    for name in ("Gloo", "frames"):
        speeds, trips = zip(*(each[1:] for each in found if each[0] == name), strict=True)
        print(f"median of {name}: {median(speeds) / 1e9:.2f} GB/s, {median(trips):.0f} µs")
    for each in processes:
        each.join()


if __name__ == "__main__":
    main()

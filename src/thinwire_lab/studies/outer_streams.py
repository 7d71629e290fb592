"""Does one connection fill a link of large bandwidth times delay, or do several?

    python -m thinwire_lab.studies.outer_streams --link 1gbit/50ms --window 4

Sends messages from one namespace to another, cut into as many parts as there are connections, as senders whose window
may have so many MB.
"""

import os
import socket
import threading
import time
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from thinwire_lab.cluster.link import parse_rate
from thinwire_lab.cluster.star import Star, address
from thinwire_lab.cluster.worker import fork

_PORT, _MESSAGES, _DONE = 7000, 4, b"!"


def _receive(star: Star, window: int) -> None:
    _enter(star, 1, window)
    with socket.create_server((address(1), _PORT)) as listener:
        while True:
            threading.Thread(target=_drain, args=(listener.accept()[0],), daemon=True).start()


def _drain(connection: socket.socket) -> None:
    while connection.recv(1 << 20):
        pass
    connection.sendall(_DONE)


def _send(star: Star, window: int, size: int) -> None:
    _enter(star, 0, window)
    time.sleep(1.0)
    for streams in (1, 4):
        began = time.monotonic()
        connections = [socket.create_connection((address(1), _PORT)) for _ in range(streams)]
        threads = [threading.Thread(target=_messages, args=(each, size // streams)) for each in connections]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = time.monotonic() - began
        print(f"{streams} connections: {8 * _MESSAGES * size / seconds / 1e6:.0f} Mbit/s", flush=True)


def _messages(connection: socket.socket, size: int) -> None:
    for _ in range(_MESSAGES):
        connection.sendall(bytes(size))
    connection.shutdown(socket.SHUT_WR)
    connection.recv(1)


def _enter(star: Star, place: int, window: int) -> None:
    star.enter(place)
    for name, start in {"tcp_rmem": 131072, "tcp_wmem": 16384}.items():
        Path(f"/proc/sys/net/ipv4/{name}").write_text(f"4096 {start} {window}")


def main(
    link: Annotated[str, typer.Option()] = "1gbit/50ms",
    window: Annotated[int, typer.Option(help="MB.")] = 4,
    size: Annotated[int, typer.Option(help="MB of a message.")] = 20,
) -> None:
    """Send, and print the throughput."""
    star, most = Star(2, parse_rate(link)), window << 20
    fork(partial(_receive, star, most))
    os.waitpid(fork(partial(_send, star, most, size * 1_000_000)), 0)


if __name__ == "__main__":
    typer.run(main)

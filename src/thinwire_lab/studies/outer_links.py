"""How fast is a link of workers that find each other by a store, with one connection and with several?

    python -m thinwire_lab.studies.outer_links --link 300mbit/100ms --connections 1,4

One worker sends another one messages, each in a namespace of its own, and waits for an answer to each. Prints the
seconds that the first took, the median of the others, and what that is in Mbit/s.
"""

import json
import os
import signal
import time
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from statistics import median
from typing import Annotated

import typer

from thinwire.collectives import links
from thinwire.collectives.certificates import Certificate
from thinwire_lab.cluster.link import Rate, parse_rate
from thinwire_lab.cluster.star import Star, address
from thinwire_lab.cluster.worker import fork
from thinwire_lab.inputs import counts

_PAUSE = 1.5  # seconds, after which a connection starts slowly again


class _Owner:
    """Answers each message. `answers`: over which link one has come."""

    limit = 1 << 40

    def __init__(self) -> None:
        self.answers = SimpleQueue[links.Link]()

    def status(self) -> links.Words:
        return {"kind": "nothing"}

    def take(self, link: links.Link, words: links.Words, body: bytes) -> None:
        if words["kind"] == "message":
            link.send({"kind": "answer"})
        elif words["kind"] == "answer":
            self.answers.put(link)

    def lost(self, link: links.Link, *, silent: bool) -> None: ...


def _listen(star: Star, certificate: Certificate | None, tell: int) -> None:
    star.enter(1)
    os.write(tell, json.dumps(links.serve(_Owner(), address(1), certificate)).encode())
    signal.pause()


def _times(rate: Rate | None, nbytes: int, messages: int, certificate: Certificate | None) -> list[float]:
    """Return the seconds of each message."""
    star, (heard, tell) = Star(2, rate), os.pipe()
    other = fork(partial(_listen, star, certificate, tell))
    host, port = json.loads(os.read(heard, 1 << 10))
    star.enter(0)
    owner, body, found = _Owner(), os.urandom(nbytes), list[float]()
    links.dial(owner, (host, port), lambda: {"kind": "message"}, lambda: True, certificate)
    link = owner.answers.get()
    for _ in range(messages):
        time.sleep(_PAUSE)
        began = time.perf_counter()
        link.send({"kind": "message"}, body)
        owner.answers.get()
        found.append(time.perf_counter() - began)
    os.kill(other, signal.SIGKILL)
    return found


def main(
    link: Annotated[str, typer.Option()] = "300mbit/100ms",
    connections: Annotated[str, typer.Option(help="How many a link has, one after the other.")] = "1,4",
    megabytes: Annotated[float, typer.Option()] = 20.0,
    messages: Annotated[int, typer.Option()] = 6,
    certificate: Annotated[Path | None, typer.Option(help="See `thinwire.outer`.")] = None,
) -> None:
    """Print a line for each number of connections."""
    for number in counts(connections, "--connections"):

        def run(number: int = number) -> None:
            links.CONNECTIONS = number
            known = None if certificate is None else Certificate(certificate)
            first, *others = _times(parse_rate(link), round(1e6 * megabytes), messages, known)
            speed = 8 * megabytes / median(others)
            print(f"{number} connections: {first:.2f} s, then {median(others):.2f} s, {speed:.0f} Mbit/s", flush=True)

        os.waitpid(fork(run), 0)


if __name__ == "__main__":
    typer.run(main)

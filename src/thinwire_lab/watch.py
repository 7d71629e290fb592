"""`thinwire watch`: what parameter servers say of themselves and of their trainers, as JSON."""

import json
import time
from collections.abc import Sequence
from contextlib import closing
from typing import Any

from thinwire.wire.frames import GoneError, Kind, Talk
from thinwire.wire.rendezvous import VARIABLE, said, ticket
from thinwire.wire.sockets import Bell, Link, check_installed

_LONGEST, _TIMEOUT = 1 << 24, 10.0


def run(addresses: Sequence[str], every: float | None) -> None:
    """Print a line for each server, again and again if told how often. Raises what `look` raises."""
    while True:
        for index, each in enumerate(addresses):
            try:
                print(json.dumps({"address": each, **look(each, index)}), flush=True)
            except GoneError as error:
                fix = f"see whether it runs, and set {VARIABLE} to its server.ticket, or to a file that holds it"
                raise GoneError(f"{each}: {error.why}", fix) from error
        if every is None:
            return
        time.sleep(every)


def look(address: str, index: int = 0) -> dict[str, Any]:
    """Return `server.status()` of that server, of several: the environment may have a ticket for each.

    Raises ConnectionError without a server or its ticket, ImportError without pyzmq, or ValueError.
    """
    check_installed()
    tickets = said(None)
    key = ticket(tickets[index % len(tickets)], address, index, seconds=_TIMEOUT)
    limits = {Kind.WATCH: _LONGEST, Kind.PING: 0, Kind.END: 1 << 16}
    with closing(Link(address, key, Bell(), Talk(limits), timeout=_TIMEOUT)) as link:
        link.send(Kind.WATCH)
        while (frame := link.receive()) is None or frame.kind is Kind.PING:
            pass
    if frame.kind is not Kind.WATCH:
        raise GoneError(frame.words)
    return dict(json.loads(bytes(frame.body)))

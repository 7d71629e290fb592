"""How a trainer connects to a server and joins."""

import json
import os
import threading
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import final

from thinwire.errors import FingerprintError, ServerError
from thinwire.wire.entries import most
from thinwire.wire.frames import ACKNOWLEDGED, LIFE, Frame, FrameError, GoneError, Kind
from thinwire.wire.keys import ticket
from thinwire.wire.layout import Layout
from thinwire.wire.sockets import Bell, Link


@final
@dataclass(frozen=True)
class Settings:
    """How a trainer (32 hexadecimal digits) talks to a server, the `index`-th: seconds of patience, bytes of log."""

    address: str
    index: int
    ticket: str | os.PathLike[str] = field(repr=False)
    trainer: str
    timeout: float
    patience: float
    room: int


def called(settings: Settings, layout: Layout, bell: Bell, closed: threading.Event) -> tuple[Link, Frame]:
    """Return a connection that has joined, and WELCOME. Raises GoneError, ServerError, or FingerprintError if refused.

    GoneError may end by itself: before the handshake anybody on the way can say that a ticket is not known.
    """
    answer = ACKNOWLEDGED.size + LIFE.size + layout.longest_answer
    limits = {Kind.PING: 0, Kind.WELCOME: answer, Kind.PARAMETERS: answer, Kind.REFUSED: 1 << 16, Kind.END: 1 << 16}
    limits[Kind.ROWS] = sum(8 + most(each) for each in layout.fetched)
    key = ticket(settings.ticket, settings.address, settings.index, seconds=settings.timeout)
    with ExitStack() as if_it_fails:
        link = Link(settings.address, key.server, key.trainers, bell, timeout=settings.timeout, limits=limits)
        if_it_fails.callback(link.close)
        link.send(Kind.JOIN, json.dumps({"trainer": settings.trainer, "agreed": dict(layout.agreed)}).encode())
        try:
            while (frame := link.receive()) is None or frame.kind is Kind.PING:
                if closed.is_set():
                    raise GoneError("this trainer was closed")
        except FrameError as error:
            raise ServerError(
                f"cannot understand {settings.address} ({error}): does it run the same version of thinwire?"
            ) from error
        if frame.kind is Kind.REFUSED:
            raise FingerprintError(f"{settings.address}: {frame.words}")
        if frame.kind is Kind.END:
            raise GoneError(frame.words)
        if_it_fails.pop_all()
    return link, frame

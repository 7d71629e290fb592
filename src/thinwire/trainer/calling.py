"""How a trainer connects to a server and joins."""

import json
import os
import threading
import time
from dataclasses import dataclass, field
from typing import final

from thinwire.errors import FingerprintError, ServerError
from thinwire.wire.entries import most
from thinwire.wire.frames import ACKNOWLEDGED, LIFE, Frame, FrameError, GoneError, Kind
from thinwire.wire.keys import ticket
from thinwire.wire.layout import Layout
from thinwire.wire.sockets import TICK, Bell, Link


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


def called(
    settings: Settings, layout: Layout, bell: Bell, deadline: float, closed: threading.Event
) -> tuple[Link, Frame]:
    """Return a connection that has joined, and WELCOME; ServerError by the deadline, or FingerprintError if refused."""
    while True:
        try:
            return _called_once(settings, layout, bell, closed)
        except GoneError as error:
            if time.monotonic() > deadline or closed.wait(TICK):
                raise ServerError(
                    f"cannot join a server at {settings.address} ({error}): start it first, with the same version of "
                    "thinwire, or pass reconnect=, in seconds, to wait for it"
                ) from error


def _called_once(settings: Settings, layout: Layout, bell: Bell, closed: threading.Event) -> tuple[Link, Frame]:
    answer = ACKNOWLEDGED.size + LIFE.size + layout.longest_answer
    limits = {Kind.PING: 0, Kind.WELCOME: answer, Kind.PARAMETERS: answer, Kind.REFUSED: 1 << 16, Kind.END: 1 << 16}
    limits[Kind.ROWS] = sum(8 + most(each) for each in layout.fetched)
    key = ticket(settings.ticket, settings.address, settings.index, seconds=settings.timeout)
    link = Link(settings.address, key.server, key.trainers, bell, timeout=settings.timeout, limits=limits)
    try:
        return link, _welcome(link, settings, layout, closed)
    except BaseException:
        link.close()
        raise


def _welcome(link: Link, settings: Settings, layout: Layout, closed: threading.Event) -> Frame:
    try:
        link.send(Kind.JOIN, json.dumps({"trainer": settings.trainer, "agreed": dict(layout.agreed)}).encode())
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
    return frame

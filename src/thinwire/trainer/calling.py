"""How a trainer connects to a server and joins."""

import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import final

from thinwire.errors import FingerprintError, ServerError
from thinwire.wire.frames import Frame, FrameError, GoneError, Kind
from thinwire.wire.keys import VARIABLE, Ticket
from thinwire.wire.sockets import TICK, Bell, Link


@final
@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a trainer (32 hexadecimal digits) talks to a server: seconds of patience, and bytes of log and bodies."""

    address: str
    ticket: Callable[[], Ticket]
    trainer: str
    agreed: Mapping[str, str]
    timeout: float
    patience: float
    log_bytes: int
    longest_answer: int
    longest_rows: int


def called(settings: Settings, bell: Bell, deadline: float, closed: threading.Event) -> tuple[Link, Frame]:
    """Return a connection that has joined, and WELCOME; ServerError by the deadline, or FingerprintError if refused."""
    while True:
        try:
            return _called_once(settings, bell, closed)
        except GoneError as error:
            if time.monotonic() > deadline or closed.wait(TICK):
                raise ServerError(
                    f"no server of this version of thinwire at {settings.address} ({error}): start it first, or pass "
                    "reconnect=, in seconds, to wait for it"
                ) from error


def _called_once(settings: Settings, bell: Bell, closed: threading.Event) -> tuple[Link, Frame]:
    limits = {Kind.PING: 0, Kind.REFUSED: 1 << 16, Kind.END: 1 << 16, Kind.ROWS: settings.longest_rows}
    limits |= dict.fromkeys((Kind.WELCOME, Kind.PARAMETERS), settings.longest_answer)
    ticket = settings.ticket()
    link = Link(settings.address, ticket.server, ticket.mine, bell, timeout=settings.timeout, limits=limits)
    try:
        return link, _welcome(link, settings, closed)
    except BaseException:
        link.close()
        raise


def _welcome(link: Link, settings: Settings, closed: threading.Event) -> Frame:
    asked = {"trainer": settings.trainer, "agreed": dict(settings.agreed)}
    try:
        link.send(Kind.JOIN, json.dumps(asked).encode())
        while (frame := link.receive()) is None or frame.kind is Kind.PING:
            if closed.is_set():
                raise GoneError("this trainer was closed")
    except ServerError as error:
        raise ServerError(
            f"{settings.address} does not know this trainer's ticket: pass server.ticket as ticket=, or set {VARIABLE}"
        ) from error
    except FrameError as error:
        raise ServerError(
            f"cannot understand {settings.address} ({error}): does it run the same version of thinwire?"
        ) from error
    said = bytes(frame.body).decode(errors="replace")
    if frame.kind is Kind.REFUSED:
        raise FingerprintError(f"{settings.address}: {said}")
    if frame.kind is Kind.END:
        raise GoneError(said)
    return frame

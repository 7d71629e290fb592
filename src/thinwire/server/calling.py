"""How a trainer connects to a server and joins."""

import json
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import final

from thinwire.errors import FingerprintError, ServerError
from thinwire.server.environment import split
from thinwire.server.frames import Frame, GoneError, Kind, Wire
from thinwire.server.joining import respond

PAUSE = 0.2  # seconds between attempts to connect


@final
@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a trainer (32 hexadecimal digits) talks to a server: seconds of patience, and bytes of log and bodies."""

    address: str
    secret: bytes = field(repr=False)
    trainer: str
    agreed: Mapping[str, str]
    timeout: float
    patience: float
    log_bytes: int
    longest_answer: int
    longest_rows: int


def called(settings: Settings, deadline: float, closed: threading.Event) -> tuple[Wire, Frame]:
    """Return a connection that has joined, and WELCOME; ServerError by the deadline, or FingerprintError if refused."""
    while True:
        try:
            return _called_once(settings)
        except (GoneError, OSError) as error:
            if isinstance(error, ServerError):
                raise
            if time.monotonic() > deadline or closed.wait(PAUSE):
                raise ServerError(
                    f"no server of this version of thinwire at {settings.address} ({error}): start it first, or pass "
                    "reconnect=, in seconds, to wait for it"
                ) from error


def _called_once(settings: Settings) -> tuple[Wire, Frame]:
    connection = socket.create_connection(split(settings.address), settings.timeout)
    limits = {Kind.PING: 0, Kind.REFUSED: 1 << 16, Kind.ROWS: settings.longest_rows}
    limits |= dict.fromkeys((Kind.WELCOME, Kind.PARAMETERS), settings.longest_answer)
    wire = Wire(connection, timeout=settings.timeout, limits=limits)
    try:
        return wire, _welcome(wire, settings)
    except BaseException:
        wire.close()
        raise


def _welcome(wire: Wire, settings: Settings) -> Frame:
    respond(wire, settings.secret, settings.address)
    asked = {"trainer": settings.trainer, "agreed": dict(settings.agreed)}
    wire.send(Kind.JOIN, json.dumps(asked).encode(), number=wire.milliseconds)
    while (frame := wire.receive()).kind is Kind.PING:
        pass
    if frame.kind is Kind.REFUSED:
        raise FingerprintError(f"{settings.address}: {bytes(frame.body).decode(errors='replace')}")
    wire.heed(frame.number)
    return frame

"""Ask a server for its status, from anywhere: any client with the secret may watch, and changes nothing."""

import json
import socket
from typing import Any, Self, final

from thinwire.errors import ServerError
from thinwire.server.environment import split
from thinwire.server.frames import FrameError, GoneError, Kind, Wire
from thinwire.server.joining import Secret, given_secret, respond, secret_of
from thinwire.server.status import ServerStatus, TrainerStatus

_TIMEOUT, _LONGEST = 10.0, 1 << 24


@final
class Watch:
    """A connection to the server at `address`, host:port. `secret` is by default the one that `serve` would take.

    Raises ServerError if there is no server, or one with another secret, and ValueError if there is none to give.
    """

    def __init__(self, address: str, secret: Secret = None) -> None:
        self._address = address
        try:
            self._wire = _met(address, secret_of(given_secret(secret), split(address)[0]))
        except (GoneError, OSError) as error:
            if isinstance(error, ServerError):
                raise
            raise ServerError(
                f"no server of this version of thinwire at {address} ({error}): is it running?"
            ) from error

    def status(self) -> ServerStatus:
        """Ask, and return the answer. Raises ServerError if the server is gone."""
        try:
            self._wire.send(Kind.WATCH, number=self._wire.milliseconds)
            while (frame := self._wire.receive()).kind is Kind.PING:
                pass
            return _read(json.loads(bytes(frame.body)))
        except (GoneError, FrameError, ValueError, KeyError, TypeError) as error:
            raise ServerError(f"the server at {self._address} is gone ({error})") from error

    def close(self) -> None:
        """Close the connection."""
        self._wire.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _met(address: str, secret: bytes) -> Wire:
    """Return a connection over which both sides know that the other has the secret."""
    connection = socket.create_connection(split(address), _TIMEOUT)
    wire = Wire(connection, timeout=_TIMEOUT, limits={Kind.PING: 0, Kind.STATUS: _LONGEST})
    try:
        respond(wire, secret, address)
    except BaseException:
        wire.close()
        raise
    return wire


def _read(said: dict[str, Any]) -> ServerStatus:
    staleness = {int(steps): count for steps, count in said["staleness"].items()}
    trainers = {name: TrainerStatus(**each) for name, each in said["trainers"].items()}
    return ServerStatus(**{**said, "staleness": staleness, "trainers": trainers})

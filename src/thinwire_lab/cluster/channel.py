"""JSON messages between processes of this machine."""

import json
import selectors
import socket
from contextlib import suppress
from typing import Any

Message = dict[str, Any]


class HungUp(Exception):  # noqa: N818 - it reads better where it is raised and caught
    """The other end of a channel is closed."""


class Channel:
    """One end of a stream of messages."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._rest = b""

    def fileno(self) -> int:
        """Return the descriptor; selectors need it."""
        return self._socket.fileno()

    def is_ready(self, timeout: float) -> bool:
        """Return whether there is something to receive within `timeout` seconds."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._socket, selectors.EVENT_READ)
            return bool(selector.select(timeout))

    def send(self, message: Message) -> None:
        """Send a message, waiting while the other end is slow; raises HungUp."""
        line = json.dumps(message).encode() + b"\n"
        try:
            self._socket.sendall(line)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise HungUp from error

    def receive(self) -> list[Message]:
        """Wait for data and return the complete messages, possibly none; raises HungUp."""
        try:
            data = self._socket.recv(1 << 16)
        except ConnectionResetError as error:
            raise HungUp from error
        if not data:
            raise HungUp
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def finish(self) -> None:
        """Tell the other end that nothing more will be sent; receiving goes on."""
        with suppress(OSError):  # it may be gone
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Hang up."""
        self._socket.close()

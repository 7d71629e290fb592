"""A worker process: forked from the supervisor, its output captured, taking jobs as JSON messages until the end."""

import ctypes
import importlib
import json
import os
import selectors
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

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


LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


def environment(threads: int) -> dict[str, str]:
    """Return what has a new process import from the same places as this one, and compute with so many threads."""
    return {"PYTHONPATH": os.pathsep.join(path or "." for path in sys.path), "OMP_NUM_THREADS": str(threads)}


Emit = Callable[[Message], None]
Handler = Callable[[Message, Emit], Any]
_PR_SET_PDEATHSIG = 1
_OUTPUT_KEPT = 16_384  # bytes


def fork(act: Callable[[], object]) -> int:
    """Return the id of a new process that does `act`, ends with status 1, and does not outlive the calling thread."""
    parent = os.getpid()
    child = os.fork()
    if child:
        return child
    try:
        _die_with(parent)
        act()
    except BaseException:  # whatever it is, it must not propagate into the parent's code
        traceback.print_exc()
    finally:
        os._exit(1)


def exit_code(process: int, *, wait: bool = True) -> int | None:
    """Return a process's exit code, negative for a signal, or None while it runs."""
    ended, status = os.waitpid(process, 0 if wait else os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


def _die_with(parent: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was gone before the kernel knew
        os._exit(1)


@dataclass
class Captured:
    """A forked process and the latest it printed."""

    process: int
    pipe: int
    output: bytes = b""

    @classmethod
    def fork(cls, act: Callable[[], object]) -> "Captured":
        """Fork a process, see `fork`, that prints into a pipe."""
        outlet, inlet = os.pipe()

        def print_into_pipe() -> None:
            for stream in (sys.stdout, sys.stderr):
                os.dup2(inlet, stream.fileno())
            act()

        process = fork(print_into_pipe)
        os.close(inlet)
        return cls(process, outlet)

    def read(self) -> bool:
        """Wait for output and keep its tail; false when there will be no more."""
        data = os.read(self.pipe, 1 << 16)
        self.output = (self.output + data)[-_OUTPUT_KEPT:]
        return bool(data)


def serve(channel: Channel, handler: str) -> None:
    """Run ``module:function`` as `handler(job, emit)` for each job; return when no more can come.

    If anything is raised, report it and stay: if this process ended, its peers would fail too and hide the cause.
    """
    try:
        module, _, function = handler.partition(":")
        _serve(channel, getattr(importlib.import_module(module), function))
    except HungUp:
        return
    except BaseException:  # SystemExit counts as an error too
        traceback.print_exc()
        channel.send({"raised": traceback.format_exc()})
    while True:
        signal.pause()


def _serve(channel: Channel, handler: Handler) -> NoReturn:
    while True:
        for job in channel.receive():
            handler(job, lambda event: channel.send({"event": event}))
            channel.send({"done": True})

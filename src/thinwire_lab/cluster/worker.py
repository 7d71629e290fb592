"""A worker process: forked from the supervisor, its output captured, taking jobs until the end."""

import ctypes
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from thinwire_lab.cluster.channel import Channel, HungUp, Message

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
        _serve(channel, _resolve(handler))
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


def _resolve(handler: str) -> Handler:
    module, _, function = handler.partition(":")
    resolved: Handler = getattr(importlib.import_module(module), function)
    return resolved

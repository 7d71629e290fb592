"""Processes forked from this one, as it sees them."""

import ctypes
import os
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass

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
    except BaseException:  # whatever it is, it must not climb into what the parent was doing
        traceback.print_exc()
    finally:
        os._exit(1)


def exit_code(process: int, *, wait: bool = True) -> int | None:
    """Return how a process ended, a signal as a negative number, or None while it runs."""
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

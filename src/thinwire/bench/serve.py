"""What a worker process does: take jobs, hand them to the handler, report what it emits."""

import ctypes
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from thinwire.bench.channel import Channel, HungUp, Message

Emit = Callable[[Message], None]
Handler = Callable[[Message, Emit], Any]

_PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Have the kernel kill this process when the thread that forked it is gone. Does nothing but on Linux."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def serve(channel: Channel, handler: str) -> NoReturn:
    """Run ``module:function`` as `handler(job, emit)` for every job, until there is no one left to send any.

    Once something is raised, report it and hold still: peers that saw this process end would fail too, and hide why.
    """
    try:
        _serve(channel, _resolve(handler))
    except HungUp:
        os._exit(0)
    except BaseException:  # an exit is as unwelcome here as an error
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
    return getattr(importlib.import_module(module), function)  # type: ignore[no-any-return]

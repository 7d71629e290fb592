"""What a worker process does: take jobs, hand them to the handler, report what it emits."""

import importlib
import signal
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from thinwire.tools.cluster.channel import Channel, HungUp, Message

Emit = Callable[[Message], None]
Handler = Callable[[Message, Emit], Any]


def serve(channel: Channel, handler: str) -> None:
    """Run ``module:function`` as `handler(job, emit)` for each job that comes; return when no more can.

    Once anything is raised, report it and hold still: peers that saw this process end would fail too, and hide why.
    """
    try:
        _serve(channel, _resolve(handler))
    except HungUp:
        return
    except BaseException:  # an exit is as unwelcome here as an error
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

"""A trainer's copy of one server's parameters, into which answers are written."""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple, final

import torch
from torch import nn

from thinwire.payloads import Blocks, Payload
from thinwire.wire.entries import write_rows
from thinwire.wire.layout import Layout, Part, Places

logger = logging.getLogger("thinwire")


class Base(NamedTuple):
    """What gradients are computed on: the server's version, as it was known when the trainer had joined so often."""

    version: int
    joins: int


@final
class Copy:
    """A trainer's copy of one server's parameters, overwritten only while `open`: not from forward to backward."""

    def __init__(self, layout: Layout, model: nn.Module) -> None:
        self._layout, self.places = layout, Places(layout, model)
        self._lock, self._opened, self._kept = threading.Lock(), 0, list[Callable[[], None]]()
        self.base = Base(0, 0)
        self._changes: list[int] | None = self._counted()

    def check(self, module: nn.Module) -> None:
        """Raise StateError if parameters of this model or replica have moved. Warn once if others write them."""
        self.places.check(module)
        if self._changes is not None and self._changes != self._counted():
            self._changes = None
            logger.warning(
                "something other than thinwire, such as an optimizer or load_state_dict, has changed parameters that a "
                "server keeps. The server's next answer overwrites the change or, with down=, leaves a difference. "
                "Swapping an average in for evaluation and out again is harmless"
            )

    def _counted(self) -> list[int]:
        """Return how often somebody else has changed each parameter in place: answers do not count."""
        return [p._version for p in self.places.parameters.values()]

    @contextmanager
    def open(self) -> Iterator[None]:
        """Write what has come, and let what comes be written at once."""
        with self._lock:
            self._opened += 1
            for write in self._kept:
                write()
            self._kept.clear()
        try:
            yield
        finally:
            with self._lock:
                self._opened -= 1

    def take(self, body: memoryview, base: Base, number: int | None = None) -> None:
        """Take in an answer to update `number`, or everything; if FrameError or PayloadError, nothing is written."""
        whole = number is None
        parts = self._layout.dense if whole else self._layout.down
        payloads, rows = self._layout.read(body, parts, self._layout.pushed, number or 1)
        write = partial(self._write, parts, payloads, rows, base)
        with self._lock:
            if whole:
                self._kept.clear()
            write() if self._opened else self._kept.append(write)

    @torch.no_grad()
    def _write(self, parts: Sequence[Part], payloads: Sequence[Payload], rows: Sequence[Blocks], base: Base) -> None:
        for part, payload in zip(parts, payloads, strict=True):
            flat = self.places.flats[part.dtype]
            if parts is self._layout.dense:
                payload.write(flat)
            else:
                change = torch.zeros_like(flat, device="cpu")
                payload.write(change)
                flat.add_(change.to(flat.device))
        for entry, found in zip(self._layout.pushed, rows, strict=True):
            write_rows(self.places.parameters[entry.name], entry, found)
        self.base = base

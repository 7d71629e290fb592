"""A trainer's copy of one server's parameters, into which answers are written."""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple, final

import torch
from torch import nn

from thinwire.codecs import Codec
from thinwire.payloads import Blocks, Payload
from thinwire.wire.layout import Layout, Part, read_parts, read_table, unpack, write_rows
from thinwire.wire.places import Places

logger = logging.getLogger("thinwire")


class Base(NamedTuple):
    """What gradients are computed on: the server's version, as it was known when the trainer had joined so often."""

    version: int
    joins: int


@final
class Copy:
    """A trainer's copy of one server's parameters, overwritten only while `open`: not from forward to backward."""

    def __init__(self, layout: Layout, model: nn.Module, codec: Codec | None) -> None:
        self._layout, self.places = layout, Places(layout, model)
        self._parts = None if codec is None else layout.of_codec(codec)
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

    def take(self, body: memoryview, number: int, base: Base, *, whole: bool) -> None:
        """Take in an answer to update `number`, or all; on FrameError or PayloadError nothing has been written."""
        with self._lock:
            write = partial(self._write, *self._read(body, number, whole=whole), base)
            if whole:
                self._kept.clear()
            if self._opened:
                write()
            else:
                self._kept.append(write)

    def _read(
        self, body: memoryview, number: int, *, whole: bool
    ) -> tuple[Sequence[Part], Sequence[Payload], Sequence[Blocks]]:
        parts = self._layout.dense if whole or self._parts is None else self._parts
        sections = unpack(body, len(parts) + len(self._layout.pushed))
        payloads = read_parts(parts, sections[: len(parts)], number)
        rows = [read_table(each, x) for each, x in zip(self._layout.pushed, sections[len(parts) :], strict=True)]
        return parts, payloads, rows

    @torch.no_grad()
    def _write(self, parts: Sequence[Part], payloads: Sequence[Payload], rows: Sequence[Blocks], base: Base) -> None:
        flats = self.places.flats
        for part, payload in zip(parts, payloads, strict=True):
            if parts is self._layout.dense:
                payload.write(flats[part.dtype])
            else:
                change = torch.zeros_like(flats[part.dtype], device="cpu")
                payload.write(change)
                flats[part.dtype].add_(change.to(flats[part.dtype].device))
        for entry, found in zip(self._layout.pushed, rows, strict=True):
            write_rows(self.places.parameters[entry.name], entry, found)
        self.base = base

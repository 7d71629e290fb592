"""How often does the host wait for the GPU?"""

from __future__ import annotations

import os
import re
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

_SAID = "Warning: called a synchronizing CUDA operation"
_PLACE = re.compile(rf"([\w./-]+\.py:\d+): \w*{_SAID}")


@dataclass
class Waits:
    """How many waits there were, and how many of them at which line of Python, where that is known."""

    count: int = 0
    places: Mapping[str, int] = field(default_factory=dict)

    def plus(self, more: Waits) -> Waits:
        """Return both together."""
        return Waits(self.count + more.count, Counter(self.places) + Counter(more.places))

    def figures(self, steps: int) -> dict[str, Any]:
        """Return how many there were in each of so many steps, and where."""
        return {"host_waits": self.count / steps, "waits_at": dict(self.places)}


@contextmanager
def counted(device: torch.device) -> Iterator[Waits]:
    """Count what `torch.cuda.set_sync_debug_mode` warns of, in any thread. On a CPU there is nothing to count.

    Threads of C++ warn on standard error, past Python. So everything is made to warn there, and that is read.
    """
    found = Waits()
    if device.type != "cuda":
        yield found
        return
    torch.cuda.synchronize(device)
    with tempfile.TemporaryFile() as file:
        with _standard_error_in(file.fileno()), warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = _tell  # type: ignore[assignment]  # it is given all by position
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield found
            finally:
                torch.cuda.set_sync_debug_mode("default")
        file.seek(0)
        said = file.read().decode(errors="replace")
    found.count = said.count(_SAID)
    found.places = Counter(re.sub(r".*thinwire/", "thinwire/", place) for place in _PLACE.findall(said))


def _tell(message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: object) -> None:
    os.write(2, f"{filename}:{lineno}: {category.__name__}: {message}\n".encode())


@contextmanager
def _standard_error_in(file: int) -> Iterator[None]:
    sys.stderr.flush()
    kept = os.dup(2)
    os.dup2(file, 2)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(kept, 2)
        os.close(kept)

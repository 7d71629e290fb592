"""Text for language models: windows of tokens, and a text that every machine with Python has."""

import os
import sysconfig
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from thinwire_lab.inputs import BadInput
from thinwire_lab.problems.base import Batch, Indices

LIMIT = 8_000_000
# Encodings and pydoc_data are generated tables and prose, and would outweigh the code.
SKIPPED = {"site-packages", "test", "tests", "idlelib", "lib2to3", "encodings", "pydoc_data", "__pycache__"}


def source_texts() -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """The training text, and every twentieth file as the held-out text: together hardly more than `LIMIT`.

    The files are the library's *.py in the order of their relative paths, without tests, generated tables and installed
    packages. Raises BadInput if there are not enough of them.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = list(_up_to_limit(sorted(_sources(root), key=lambda path: path.relative_to(root).as_posix())))
    rest = files[19::20]
    if not rest:
        raise BadInput(f"there is no Python source to train on under {root}; name a text file with --data")
    del files[19::20]
    return np.frombuffer(b"".join(files), np.uint8), np.frombuffer(b"".join(rest), np.uint8)


def _sources(root: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(root):
        folders[:] = set(folders) - SKIPPED
        yield from (Path(folder, name) for name in names if name.endswith(".py"))


def _up_to_limit(paths: list[Path]) -> Iterator[bytes]:
    total = 0
    for path in paths:
        if total >= LIMIT:
            return
        content = b""
        with suppress(OSError):
            content = path.read_bytes()
        total += len(content)
        yield content


@dataclass(frozen=True, kw_only=True)
class Windows:
    """Every window of `length` tokens in the stream `tokens` (any integer type) that has a token after it.

    Raises BadInput, naming the `source`, if there is none.
    """

    tokens: NDArray[Any]
    length: int
    source: str

    def __post_init__(self) -> None:
        """Refuse a stream too short to hold a single window."""
        if len(self.tokens) <= self.length:
            raise BadInput(f"{self.source} is too short ({len(self.tokens)} tokens); use a longer text")

    def __len__(self) -> int:
        """How many windows there are; they overlap."""
        return len(self.tokens) - self.length

    def take(self, starts: Indices) -> Batch:
        """The windows that begin at `starts` (n,), and the same shifted by one token: two int64 (n, length)."""
        rows = torch.from_numpy(np.asarray(self.tokens[starts[:, None] + np.arange(self.length + 1)], np.int64))
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()  # pipelines of torch 2.11 compare strides

    def draw(self, generator: np.random.Generator, count: int) -> Batch:
        """`count` windows chosen at random, as `take` gives them."""
        return self.take(generator.integers(len(self), size=count))

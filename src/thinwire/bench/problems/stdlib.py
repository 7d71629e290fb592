"""A text that every machine with Python has: the source of its standard library."""

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from thinwire.bench.problems.base import BadInput

LIMIT = 8_000_000
SKIPPED = {"site-packages", "test", "idlelib", "lib2to3", "__pycache__"}


def source_text() -> NDArray[np.uint8]:
    """The standard library's *.py files in the order of their relative paths, joined; at most `LIMIT` bytes.

    Tests and what is installed beside the library are left out. Raises BadInput where there are no such files.
    """
    root = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in sorted(_sources(root), key=lambda path: path.relative_to(root).as_posix()):
        text += _bytes(path)
        if len(text) >= LIMIT:
            break
    if not text:
        raise BadInput(f"no Python sources under {root}; name a text file with --data")
    return np.frombuffer(bytes(text[:LIMIT]), np.uint8)


def _sources(root: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(root):
        folders[:] = set(folders) - SKIPPED
        yield from (Path(folder, name) for name in names if name.endswith(".py"))


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""

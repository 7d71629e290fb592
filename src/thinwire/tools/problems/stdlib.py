"""A text that every machine with Python has: the source of its standard library."""

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from thinwire.tools.inputs import BadInput

LIMIT = 8_000_000
# Encodings and pydoc_data are generated tables and prose, long enough to drown the code.
SKIPPED = {"site-packages", "test", "tests", "idlelib", "lib2to3", "encodings", "pydoc_data", "__pycache__"}


def source_texts() -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """The text to train on and the one to hold out, every twentieth file: together a little over `LIMIT` at most.

    The files are the library's *.py in the order of their relative paths; tests, generated tables and what is
    installed beside the library are left out. Raises BadInput where there are not enough of them.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = list(_up_to_limit(sorted(_sources(root), key=lambda path: path.relative_to(root).as_posix())))
    rest = files[19::20]
    if not rest:
        raise BadInput(f"there is no Python source to train on under {root}; name a text file with --data")
    del files[19::20]
    return _joined(files), _joined(rest)


def _sources(root: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(root):
        folders[:] = set(folders) - SKIPPED
        yield from (Path(folder, name) for name in names if name.endswith(".py"))


def _up_to_limit(paths: list[Path]) -> Iterator[bytes]:
    total = 0
    for path in paths:
        if total >= LIMIT:
            return
        content = _bytes(path)
        total += len(content)
        yield content


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _joined(files: list[bytes]) -> NDArray[np.uint8]:
    return np.frombuffer(b"".join(files), np.uint8)

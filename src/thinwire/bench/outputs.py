"""Files that a command is to leave behind."""

import os
from collections.abc import Iterable
from pathlib import Path

from thinwire.bench.problems.base import BadInput


def check_writable(paths: Iterable[Path | None]) -> None:
    """Raise BadInput when one cannot be written; to be called before anything has been measured."""
    for path in paths:
        if path is not None and (path.is_dir() or not os.access(path.absolute().parent, os.W_OK)):
            raise BadInput(f"cannot write {path}; expected a file in a directory that exists and may be written to")

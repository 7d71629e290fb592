"""A file that is either the old state or the new one, whenever the machine stops."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, final

import torch

from thinwire.errors import StateError

_VERSION = 1


@final
class Durable:
    """A server's checkpoint at `path`. Saving writes a file beside it, syncs it to disk and renames it."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._mine = _identity(self._path)

    def save(self, state: dict[str, Any]) -> None:
        """Replace the checkpoint. Raises OSError, and then the old one is still there.

        Raises it, too, if the file there is another than this server has read or written: it is another server's.
        """
        if _identity(self._path) not in (self._mine, None):
            raise FileExistsError(
                f"{self._path} was written by somebody else: give each server a checkpoint of its own, and end an "
                "earlier server before it is started again"
            )
        beside = self._path.with_name(f"{self._path.name}.{os.getpid()}.new")
        try:
            with beside.open("wb") as file:
                torch.save({"format": _VERSION, **state}, file)
                file.flush()
                os.fsync(file.fileno())
            self._mine = _identity(beside)
            beside.replace(self._path)
        except RuntimeError as error:  # torch's, where the disk is full
            raise OSError(f"{beside} could not be written: {error}") from error
        finally:
            beside.unlink(missing_ok=True)
        _sync_folder(self._path.parent)

    def load(self, restore: Callable[[dict[str, Any]], None]) -> bool:
        """Hand what was saved to `restore`. Return whether there was anything. Raises StateError if it is damaged."""
        if not self._path.exists():
            return False
        try:
            saved = torch.load(self._path, weights_only=True)
            if saved["format"] != _VERSION:
                raise StateError(f"{self._path} has format {saved['format']}; expected {_VERSION}")
            restore(saved)
        except (RuntimeError, LookupError, EOFError, OSError, TypeError) as error:
            raise StateError(f"{self._path} is no checkpoint of a server ({error}): delete it to start anew") from error
        return True


def _identity(path: Path) -> tuple[int, int] | None:
    """Return what tells a file from one that was written later in its place; None if there is none."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

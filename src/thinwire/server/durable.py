"""A file that is either the old state or the new one, whenever the machine stops."""

import os
from collections.abc import Callable
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, final
from weakref import finalize

import torch

from thinwire.errors import StateError

_VERSION = 1


@final
class Durable:
    """A server's checkpoint at `path`. Saving writes a file beside it, syncs it to disk and renames it."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._mine = -1  # a descriptor, kept so that no other file gets its number
        self._let_go: Callable[[], object] = bool
        self._tried = False

    def save(self, state: dict[str, Any]) -> None:
        """Replace the checkpoint. Raises OSError, and then the old one is still there.

        Raises it, too, if the file there is another than this server has read or written: it is another server's.
        """
        if not self._is_mine():
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
            self._try(beside)
            mine = os.open(beside, os.O_RDONLY)
            beside.replace(self._path)
            self._keep(mine)
        except RuntimeError as error:  # torch's, where the disk is full
            raise OSError(f"{beside} could not be written: {error}") from error
        finally:
            beside.unlink(missing_ok=True)
        _sync_folder(self._path.parent)

    def _try(self, beside: Path) -> None:
        """Read the first checkpoint back. Raises OSError if that cannot be done: a later start could not either."""
        if self._tried:
            return
        try:
            torch.load(beside, weights_only=True)
        except UnpicklingError as error:
            raise OSError(
                f"the optimizer's or scheduler's state cannot be read back ({error}): keep numbers and tensors in it"
            ) from error
        self._tried = True

    def _is_mine(self) -> bool:
        """Whether the file there is the one that this server has read or written last, or none."""
        try:
            found = self._path.stat()
        except FileNotFoundError:
            return True
        return self._mine >= 0 and os.path.samestat(found, os.fstat(self._mine))

    def _keep(self, descriptor: int) -> None:
        self._let_go()
        self._mine, self._let_go = descriptor, finalize(self, os.close, descriptor)

    def load(self, restore: Callable[[dict[str, Any]], None]) -> bool:
        """Hand what was saved to `restore`. Return whether there was anything. Raises StateError if it is damaged."""
        if not self._path.exists():
            return False
        self._keep(os.open(self._path, os.O_RDONLY))
        try:
            saved = torch.load(self._path, weights_only=True)
            if saved["format"] != _VERSION:
                raise StateError(f"{self._path} has format {saved['format']}; expected {_VERSION}")
            restore(saved)
        except (RuntimeError, LookupError, EOFError, OSError, TypeError, UnpicklingError) as error:
            raise StateError(f"{self._path} is no checkpoint of a server ({error}): delete it to start anew") from error
        return True


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

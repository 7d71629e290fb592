"""A server's checkpoint: when it is written, and a file that is the old state or the new one whenever it stops."""

import os
import re
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, final
from weakref import finalize
from zipfile import BadZipFile, ZipFile

import torch

from thinwire.errors import StateError
from thinwire.server.central import Central

_VERSION = 1


@final
class Durable:
    """A checkpoint at `path`, written beside it, synced and renamed; the one before is kept as `path`.previous.

    Raises OSError if no file can be written there.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path).resolve()  # wherever this process goes, and a link stays one
        self._previous = self._path.with_name(f"{self._path.name}.previous")
        self._beside = self._path.with_name(f"{self._path.name}.{os.getpid()}.new")
        self._mine, self._read = -1, False
        self._let_go: Callable[[], object] = bool
        if self._path.is_dir():
            raise IsADirectoryError(f"checkpoint is {str(self._path)!r}, a folder; expected a file in it")
        try:
            self._beside.touch()
            drafts = re.compile(re.escape(self._path.name) + r"\.\d+\.new")  # also those of servers that were killed
            for each in self._path.parent.iterdir():
                if drafts.fullmatch(each.name):
                    each.unlink(missing_ok=True)
        except OSError as error:
            raise type(error)(error.errno, f"checkpoint cannot be written: {error.strerror}", str(path)) from error

    def save(self, state: dict[str, Any], *, keep: bool = True) -> None:
        """Replace the checkpoint; OSError, with the old one in place, where that fails or it is another server's."""
        if self._path.exists() and not (self._mine >= 0 and os.path.samestat(self._path.stat(), os.fstat(self._mine))):
            raise FileExistsError(
                f"{self._path} was written by another process: give each server a checkpoint of its own, and stop a "
                "server before you restart it"
            )
        try:
            with self._beside.open("wb") as file:
                torch.save({"format": _VERSION, **state}, file)
                file.flush()
                os.fsync(file.fileno())
            self._read = self._read or bool(_read(self._beside))  # the first: no later start could, either
            if keep:
                self._keep_previous()
            mine = os.open(self._beside, os.O_RDONLY)
            self._beside.replace(self._path)
            self._keep(mine)
        except UnpicklingError as error:
            raise OSError(
                f"the optimizer's or scheduler's state cannot be read back ({error}): keep only numbers and "
                "tensors in it"
            ) from error
        except RuntimeError as error:  # torch's, where the disk is full
            raise OSError(f"{self._beside} could not be written: {error}") from error
        finally:
            self._beside.unlink(missing_ok=True)
        folder = os.open(self._path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _keep_previous(self) -> None:
        with suppress(OSError):  # there is none yet, or the file system has no hard links
            link = self._beside.with_suffix(".old")
            link.unlink(missing_ok=True)
            os.link(self._path, link)
            link.replace(self._previous)

    def _keep(self, descriptor: int) -> None:
        """Keep what was read or written last open, so that no other file gets its number."""
        self._let_go()
        self._mine, self._let_go = descriptor, finalize(self, os.close, descriptor)

    def load(self, restore: Callable[[dict[str, Any]], None]) -> None:
        """Hand what was saved to `restore`, if anything was. Raises StateError if it is damaged."""
        if not self._path.exists():
            return
        self._keep(os.open(self._path, os.O_RDONLY))
        try:
            saved = _read(self._path)
            if saved["format"] != _VERSION:
                raise StateError(f"{self._path} has format {saved['format']}; expected {_VERSION}")
            restore(saved)
        except StateError:
            raise
        except Exception as error:
            others = f"{self._previous}, which is the one before it," if self._previous.exists() else "a copy of it"
            raise StateError(
                f"{self._path} is not a server's checkpoint, or is damaged ({error}): put {others} in its place, or "
                "move it away to start from scratch"
            ) from error


@final
class Saving:
    """Saves the central copy, and knows what has been saved; `soon` is set to ask for a checkpoint soon.

    Restores it first, if there is a checkpoint. Raises OSError if none can be written, StateError if it is damaged.
    """

    def __init__(self, central: Central, lock: threading.Condition, path: str | os.PathLike[str] | None) -> None:
        self.durable = None if path is None else Durable(path)
        if self.durable is not None:
            self.durable.load(central.restore)
        self._central, self._lock, self._writing = central, lock, threading.Lock()
        """`_writing`: a state is never replaced by an older one."""
        self._saved, self._version = dict(central.applied), central.version
        self.soon = threading.Event()

    def latest(self, trainer: str) -> int:
        """Return a trainer's latest update that will outlive the server; without a checkpoint, none has to."""
        held = self._central.applied if self.durable is None else self._saved
        return held.get(trainer, 0)

    def save(self) -> None:
        """Save now; ValueError without a checkpoint, OSError of the disk, and ServerError after a step that failed."""
        if self.durable is None:
            raise ValueError("this server has no checkpoint: pass checkpoint= to serve")
        with self._writing:
            with self._lock:
                self._central.check()
                state = self._central.state()
            self.durable.save(state, keep=self._central.sound >= self._version)  # gradients were finite on it
            with self._lock:
                self._saved, self._version = state["applied"], state["version"]


def _read(path: Path) -> Any:
    """Return what a file holds, if the checksums in it are right: torch.load does not look."""
    with ZipFile(path) as records:
        if (damaged := records.testzip()) is not None:
            raise BadZipFile(f"the checksum of {damaged} is wrong")
    return torch.load(path, weights_only=True)

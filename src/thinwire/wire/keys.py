"""Who may join: a server's key, and the ticket of its trainers.

A server has two pairs of CURVE keys: its own, by which trainers know it, and one by which it knows them. The ticket is
its public key and their secret one: with it one can join, and not be taken for the server. A trainer's ticket is given,
or in THINWIRE_TICKET, or in a file that a server leaves for this user's processes on its host, or in torchrun's store.
"""

import logging
import os
import secrets
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fcntl import LOCK_EX, flock
from ipaddress import ip_address
from pathlib import Path
from string import hexdigits
from typing import Annotated, Any, Self, final

from thinwire.checked import BODY
from thinwire.wire import environment
from thinwire.wire.frames import GoneError
from thinwire.wire.sockets import fresh_secret, public_of, resolved

logger = logging.getLogger("thinwire")
Given = Annotated[str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None, BODY]
"""Tickets, or files that hold them: one for all servers, or one for each. No error may show one."""
VARIABLE = "THINWIRE_TICKET"
_DIGITS = 128
_ANY = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Addresses at which a server listens at all of its machine's, and where those lead who call there."""


@final
@dataclass(frozen=True, repr=False)
class Key:
    """A server's key, or a ticket: the server's secret key, or its public one, and the trainers' secret key."""

    server: bytes
    trainers: bytes

    @classmethod
    def read(cls, text: str, where: str) -> Self:
        """Return what is written there. Raises ValueError, which does not show it."""
        found = b""
        with suppress(ValueError):
            found = bytes.fromhex(text)
        if 2 * len(found) != _DIGITS:
            raise ValueError(f"{where} holds no key or ticket of a server; expected {_DIGITS} hexadecimal digits")
        return cls(found[: _DIGITS // 4], found[_DIGITS // 4 :])

    @property
    def text(self) -> str:
        """It as it is written."""
        return (self.server + self.trainers).hex()

    @property
    def ticket(self) -> Self:
        """What trainers need of a server's key."""
        return type(self)(public_of(self.server), self.trainers)


def key_of(path: Path | None) -> Key:
    """Return the key in this file, which is made if it is not there, and its ticket beside it; None: one for once.

    Raises ValueError for a file that others may read or that holds something else, and OSError.
    """
    made = Key(fresh_secret(), fresh_secret())
    if path is None:
        return made
    if not path.exists() or not path.stat().st_size:
        path.touch(mode=0o600)
        with path.open("r+") as file:
            with suppress(OSError):  # there are no locks
                flock(file, LOCK_EX)  # of servers that start at once, one writes it
            if not path.stat().st_size:
                file.write(made.text)
    found = Key.read(_private(path), str(path))
    with suppress(OSError):  # the key may be where nothing can be written
        _write(path.with_name(f"{path.name}.ticket"), found.ticket.text)
    return found


def leave(address: str, text: str) -> Callable[[], None]:
    """Leave a ticket for this user's processes on this host, if that can be; return what takes it away."""
    try:
        path = _left(*environment.split(address))
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _write(path, text)
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
        logger.warning("trainers will not find the ticket by themselves (%s): give them server.ticket", error)
        return lambda: None

    def take() -> None:
        with suppress(OSError):
            if path.read_text() == text:
                path.unlink()

    return take


def said(given: Given) -> list[str | os.PathLike[str]]:
    """Return the tickets, or the files with them, as given or in the environment; "" to look for it. Or TypeError."""
    found: Any = os.environ.get(VARIABLE, "").split(",") if given is None else given
    each = list(found) if isinstance(found, Sequence) and not isinstance(found, (str, bytes)) else [found]
    each = [one.strip() if isinstance(one, str) else one for one in each]
    if wrong := [one for one in each if not isinstance(one, (str, os.PathLike))]:
        raise TypeError(f"ticket is of type {type(wrong[0]).__name__}; expected a str, a path, or one for each server")
    return each


def ticket(given: str | os.PathLike[str], address: str, index: int, *, seconds: float) -> Key:
    """Return the ticket for a server as it is now: one that starts again may leave another.

    Raises ValueError for what is no ticket, GoneError if there is none, and ServerError if the store has none in time.
    """
    if isinstance(given, str) and given and not set(given) - set(hexdigits):
        return Key.read(given, "the ticket")
    if given:
        return Key.read(_private(Path(given)), "that file")
    host, port = resolved(address)
    others = {_ANY.get(host, host), "::" if ":" in host else "0.0.0.0", "::"} if environment.is_here(host) else set()
    newest = max((_left(each, port) for each in {host, *others}), key=_written)  # of those servers one is alive
    if newest.exists() or ip_address(host).is_loopback:
        return Key.read(_private(newest), "what was left")
    stored = environment.awaited([environment.TICKET.format(index)], seconds, agent=True)
    return Key.read("".join(stored) or _private(newest), "what was stored")


def _written(path: Path) -> float:
    with suppress(OSError):
        return path.stat().st_mtime
    return 0.0


def _left(host: str, port: int) -> Path:
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")  # which several hosts may share
    return home / "thinwire" / "tickets" / socket.gethostname() / environment.joint(host, port)


def _private(path: Path) -> str:
    """Return what is in a file of this user alone. Raises ValueError if others may read it, GoneError without one."""
    try:
        found = path.stat()
        if found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise ValueError(f"{path} can be read by other users: chmod 600, or delete it")
        return path.read_text()
    except OSError as error:
        why = f"no ticket for this server: {error.strerror}"  # without the name, which may be a damaged ticket
        raise GoneError(
            why,
            f"start it first, or pass reconnect= to connect, which then waits; or its server.ticket, as {VARIABLE} or "
            "ticket=",
        ) from None


def _write(path: Path, text: str) -> None:
    """Write a file, whole and readable for this user alone."""
    beside = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    beside.touch(mode=0o600, exist_ok=False)
    try:
        beside.write_text(text)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)

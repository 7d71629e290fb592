"""Who may join: a server's key, and the ticket of its trainers.

A server has two pairs of CURVE keys: its own, by which trainers know it, and one by which it knows them. The ticket is
its public key and their secret one, in 128 hexadecimal digits: with it one can join, and not be taken for the server.
A trainer's ticket is given, or in THINWIRE_TICKET, or in a file that a server leaves for this user's processes on its
host, or in torchrun's store.
"""

import os
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, final

from thinwire.checked import BODY
from thinwire.wire import environment
from thinwire.wire.frames import GoneError
from thinwire.wire.sockets import fresh_secret, public_of, resolved

Given = Annotated[str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None, BODY]
"""Tickets, or files that hold them: one for all servers, or one for each. No error may show one."""
VARIABLE = "THINWIRE_TICKET"
_DIGITS = 128


@final
@dataclass(frozen=True, kw_only=True)
class Ticket:
    """What a trainer has: the server's public key, and the trainers' secret one; 32 bytes each."""

    server: bytes
    mine: bytes = field(repr=False)

    @property
    def text(self) -> str:
        """The ticket as it is written."""
        return (self.server + self.mine).hex()


@final
@dataclass(frozen=True, kw_only=True)
class Key:
    """What a server has: the secret keys of both pairs, 32 bytes each."""

    own: bytes = field(repr=False)
    trainers: bytes = field(repr=False)

    @property
    def ticket(self) -> Ticket:
        """Return what its trainers need."""
        return Ticket(server=public_of(self.own), mine=self.trainers)


def key_of(path: Path | None) -> Key:
    """Return the key in this file, which is made if it is not there, and its ticket beside it; None: one for once.

    Raises ValueError for a file that others may read or that holds something else, and OSError.
    """
    made = Key(own=fresh_secret(), trainers=fresh_secret())
    if path is None:
        return made
    if not path.exists():
        with suppress(FileExistsError):
            _write(path, (made.own + made.trainers).hex(), over=False)
    own, trainers = _halves(_private(path), str(path))
    found = Key(own=own, trainers=trainers)
    with suppress(OSError):  # the key may be where nothing can be written
        _write(path.with_name(f"{path.name}.ticket"), found.ticket.text)
    return found


def leave(address: str, ticket: Ticket) -> Callable[[], None]:
    """Leave a ticket for this user's processes on this host; return what takes it away. Raises OSError."""
    host, port = environment.split(address)
    here = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    path = _left(environment.joint(here, port))
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    _write(path, ticket.text)

    def take() -> None:
        with suppress(OSError):
            if path.read_text() == ticket.text:
                path.unlink()

    return take


def named(given: Given) -> list[str | os.PathLike[str]]:
    """Return the tickets that are given, or else those that the environment names. Raises TypeError."""
    found: Any = os.environ.get(VARIABLE, "").split(",") if given is None else given
    several = isinstance(found, Sequence) and not isinstance(found, str)
    each: list[Any] = list(found) if several else [found]
    if wrong := [one for one in each if not isinstance(one, (str, os.PathLike))]:
        raise TypeError(f"ticket is of type {type(wrong[0]).__name__}; expected a str, a path, or one for each server")
    return each


def tickets(each: Sequence[str | os.PathLike[str]], places: Sequence[str]) -> list[Callable[[], Ticket]]:
    """Return for each server what finds its ticket, now or later: a server that starts again may leave another.

    Raises ValueError for what is no ticket, and if there is none to be had. What finds one raises GoneError.
    """
    each = [*each] * len(places) if len(each) == 1 else each
    if len(each) != len(places):
        raise ValueError(f"{len(each)} tickets for {len(places)} servers; expected one, or one for each")
    return [_finder(said, place, i) for i, (said, place) in enumerate(zip(each, places, strict=True))]


def _finder(said: str | os.PathLike[str], place: str, index: int) -> Callable[[], Ticket]:
    if isinstance(said, str) and len(said) == _DIGITS:
        ticket = _ticket(said, "the ticket")
        return lambda: ticket
    if said:
        return lambda: _ticket(_private(Path(said)), "that file")
    return lambda: _ticket(_found(place, index), "what was left")


def _found(place: str, index: int) -> str:
    """Return the ticket that a server has left on this host or in torchrun's store. Raises GoneError."""
    host, port = resolved(place)
    path = _left(environment.joint(host, port))
    if path.exists() or environment.is_loopback(host) or (stored := environment.stored_ticket(index)) is None:
        return _private(path)
    return stored


def _ticket(text: str, where: str) -> Ticket:
    server, mine = _halves(text, where)
    return Ticket(server=server, mine=mine)


def _halves(text: str, where: str) -> tuple[bytes, bytes]:
    try:
        found = bytes.fromhex(text)
    except ValueError:
        found = b""
    if len(found) != _DIGITS // 2:
        raise ValueError(f"{where} holds no key or ticket of a server; expected {_DIGITS} hexadecimal digits")
    return found[:32], found[32:]


def _left(address: str) -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "thinwire" / "tickets" / address


def _private(path: Path) -> str:
    """Return what is in a file of this user alone. Raises ValueError if others may read it, GoneError without one."""
    try:
        found = path.stat()
        if found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise ValueError(f"{path} can be read by other users: chmod 600, or delete it")
        return path.read_text()
    except OSError as error:
        raise GoneError(f"no ticket for this server: pass ticket=, or set {VARIABLE}; {error}") from error


def _write(path: Path, text: str, *, over: bool = True) -> None:
    """Write a file, whole and readable for this user alone. Raises FileExistsError if it must not be written over."""
    beside = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    beside.touch(mode=0o600, exist_ok=False)
    try:
        beside.write_text(text)
        beside.replace(path) if over else os.link(beside, path)
    finally:
        beside.unlink(missing_ok=True)

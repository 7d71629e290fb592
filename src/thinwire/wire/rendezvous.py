"""Where servers are, and where they keep their keys and leave their trainers' tickets.

An address is given, or in torchrun's store. A ticket is given, or in THINWIRE_TICKET, or in a file that a server leaves
for this user's processes on its host, or in torchrun's store.
"""

import logging
import os
import secrets
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from fcntl import LOCK_EX, flock
from ipaddress import ip_address
from pathlib import Path
from string import hexdigits
from typing import Annotated, Any

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from thinwire.checked import BODY
from thinwire.errors import ServerError
from thinwire.wire.frames import GoneError
from thinwire.wire.sockets import SECRET, Key, is_here, joint, resolved, split

logger = logging.getLogger("thinwire")
Given = Annotated[str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None, BODY]
"""Tickets, or files that hold them: one for all servers, or one for each. No error may show one."""
VARIABLE = "THINWIRE_TICKET"
_ENDLESS = 1e9  # seconds: torch counts nanoseconds in 64 bits
_announced = set[int]()
_stores: list[dist.distributed_c10d.Store] = []  # rank 0 may host it, so it lives as long as the process
_ANY = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Addresses at which a server listens at all of its machine's, and where those lead who call there."""


def key_of(path: Path | None) -> Key:
    """Return the key in this file, which is made if it is not there, and its ticket beside it; None: one for once.

    Raises ValueError for a file that others may read or that holds something else, and OSError.
    """
    made = Key.fresh()
    if path is None:
        return made
    name = path.name.strip()
    if name.startswith(SECRET) or (len(name) >= 64 and set(name) <= {*hexdigits}):
        raise ValueError("key is a key or a ticket; expected a file that holds the key, or that is to be made")
    if not path.exists() or not path.stat().st_size:
        path.touch(mode=0o600)
        with path.open("r+") as file:
            with suppress(OSError):  # there are no locks
                flock(file, LOCK_EX)  # of servers that start at once, one writes it
            if not _private(path):
                file.write(SECRET + made.text)
    found = Key.read((text := _private(path)).removeprefix(SECRET), str(path))
    if not text.startswith(SECRET):
        raise ValueError(
            f"{path} holds a ticket, which trainers have; expected the server's key: the file without .ticket"
        )
    with suppress(OSError):  # the key may be where nothing can be written
        _write(path.with_name(f"{path.name}.ticket"), found.ticket.text)
    return found


def leave(address: str, text: str) -> Callable[[], None]:
    """Leave a ticket for this user's processes on this host, if that can be; return what takes it away."""
    try:
        path = _left(*split(address))
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


def place(index: int | None, servers: int, address: str | None) -> int:
    """Return which of the servers this is: `index`, or else the rank.

    Raises ValueError if there are not so many, or if this process has announced that one: trainers would look for it.
    """
    found = int(os.environ.get("RANK", 0)) if index is None else index
    if found >= servers:
        raise ValueError(
            f"this is server {found} of {servers}, counted from 0: pass index= and servers=, or serve on the first "
            f"{servers} ranks and connect on the others"
        )
    if address is None and found in _announced:
        raise ValueError(
            "this process has served before in this torchrun job, and trainers find its first server only: pass "
            "address= to serve and to connect"
        )
    return found


def announce(what: str, index: int, text: str) -> None:
    """Put a server's "address" or "ticket" into the job's store, if there is one, where all can read it."""
    if (store := _store(agent=what == "ticket")) is not None:
        store.set(_key(what, index), text)
        _announced.update([index] * (what == "address"))


def addresses(given: str | Sequence[str] | None, servers: int, seconds: float) -> list[str]:
    """Return each server's address, given or awaited from the store.

    Raises ValueError if there are not as many, or none; ServerError if no server has announced itself in time.
    """
    if given is not None:
        found = [given] if isinstance(given, str) else list(given)
        if len(found) != servers:
            raise ValueError(f"address has {len(found)} addresses for {servers} servers; expected one for each")
        return found
    if not (found := _awaited("address", range(servers), seconds)):
        raise ValueError("no address: pass host:port of each server, or start servers and trainers with torchrun")
    return found


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
    if isinstance(given, str) and given and not set(given.removeprefix(SECRET)) - set(hexdigits):
        return Key.read(given, "the ticket")
    if given:
        return Key.read(_private(Path(given)), str(given))
    host, port = resolved(address)
    others = {_ANY.get(host, host), "::" if ":" in host else "0.0.0.0", "::"} if is_here(host) else set()
    newest = max((_left(each, port) for each in {host, *others}), key=_written)  # of those servers one is alive
    if newest.exists() or ip_address(host).is_loopback:
        return Key.read(_private(newest), "what was left")
    stored = _awaited("ticket", [index], seconds)
    return Key.read("".join(stored) or _private(newest), "what was stored")


def _awaited(what: str, servers: Sequence[int], seconds: float) -> list[str]:
    """Return what servers have announced, nothing if there is no store. Raises ServerError."""
    keys, seconds = [_key(what, index) for index in servers], min(seconds, _ENDLESS)
    try:
        if (store := _store(agent=what == "ticket", seconds=seconds)) is None:
            return []
        store.wait(keys, timedelta(seconds=seconds))
    except dist.DistError as error:
        raise ServerError(
            f"no server has put {keys[0]} into torchrun's store within {seconds:g} s: start it first, or have connect "
            "wait for it, with reconnect=, in seconds"
        ) from error
    return [store.get(key).decode() for key in keys]


def _key(what: str, index: int) -> str:
    return f"thinwire/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}/{what}/{index}"  # the store outlives an attempt


def _store(*, agent: bool = False, seconds: float = 1800.0) -> dist.distributed_c10d.Store | None:
    """Return the job's store, if there is one; `agent`: only torchrun's, as rank 0 may never make another."""
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        return None
    if agent and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    if not _stores:
        _stores.append(next(rendezvous("env://", timeout=timedelta(seconds=seconds)))[0])
    return _stores[0]


def _written(path: Path) -> float:
    with suppress(OSError):
        return path.stat().st_mtime
    return 0.0


def _left(host: str, port: int) -> Path:
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")  # which several hosts may share
    return home / "thinwire" / "tickets" / socket.gethostname() / joint(host, port)


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

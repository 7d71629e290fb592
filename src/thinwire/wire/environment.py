"""Where servers are: as host:port, or through the store that torchrun's environment names."""

import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from thinwire.errors import ServerError

_ADDRESS, _TICKET = "thinwire/server/{}", "thinwire/ticket/{}"
_announced = set[int]()
_stores: list[dist.distributed_c10d.Store] = []  # rank 0 may host it, so it lives as long as the process


def split(address: str) -> tuple[str, int]:
    """Return host and port. Raises ValueError for anything else."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"address is {address!r}; expected host:port, such as 10.0.0.1:29400 or [::1]:29400")
    return host.strip("[]"), int(port)


def joint(host: str, port: int) -> str:
    """Return host:port, as `split` takes it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def can_listen(host: str, port: int = 0) -> bool:
    """Return whether a socket could listen there: not at another machine's address, nor where one listens already."""
    with suppress(OSError), socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))
        return True
    return False


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


def announce(index: int, address: str) -> None:
    """Tell the environment's store where a server is, if there is one."""
    if (store := _store()) is not None:
        store.set(_ADDRESS.format(index), address)
        _announced.add(index)


def store_ticket(index: int, text: str) -> None:
    """Give torchrun's store a server's ticket, if there is one: whoever reaches the store can read it."""
    if (store := _store(agent=True)) is not None:
        store.set(_TICKET.format(index), text)


def stored_ticket(index: int, seconds: float) -> str:
    """Return a server's ticket, awaited from torchrun's store; "" without one. Raises ServerError in time."""
    return "".join(_awaited([_TICKET.format(index)], seconds, agent=True))


def addresses(given: str | Sequence[str] | None, servers: int, seconds: float) -> list[str]:
    """Return each server's address, given or awaited from the store.

    Raises ValueError if there are not as many, or none; ServerError if no server has announced itself in time.
    """
    if given is not None:
        found = [given] if isinstance(given, str) else list(given)
        if len(found) != servers:
            raise ValueError(f"address has {len(found)} addresses for {servers} servers; expected one for each")
        return found
    if not (awaited := _awaited([_ADDRESS.format(index) for index in range(servers)], seconds)):
        raise ValueError("no address: pass host:port of each server, or start servers and trainers with torchrun")
    return awaited


def _awaited(keys: list[str], seconds: float, *, agent: bool = False) -> list[str]:
    try:
        if (store := _store(agent=agent, seconds=seconds)) is None:
            return []
        store.wait(keys, timedelta(seconds=seconds))
    except dist.DistError as error:
        raise ServerError(
            f"no server has put {keys[0]} into torchrun's store within {seconds:g} s: start it first, or pass "
            "reconnect=, in seconds, to wait for it"
        ) from error
    return [store.get(key).decode() for key in keys]


def _store(*, agent: bool = False, seconds: float = 1800.0) -> dist.distributed_c10d.Store | None:
    """Return the job's store, if there is one; `agent`: only torchrun's, as rank 0 may never make another."""
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        return None
    if agent and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    if not _stores:
        store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=seconds)))
        _stores.append(store)
    return _stores[0]

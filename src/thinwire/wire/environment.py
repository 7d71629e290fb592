"""Where servers are: as host:port, or through the store that torchrun's environment names."""

import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from thinwire.errors import ServerError

_ADDRESS, TICKET = "thinwire/server/{}", "thinwire/ticket/{}"
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


def is_here(host: str) -> bool:
    """Return whether this is an address of this machine."""
    with suppress(OSError), socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
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
    if store(_ADDRESS.format(index), address):
        _announced.add(index)


def store(key: str, text: str, *, agent: bool = False) -> bool:
    """Put a text into the job's store, where all can read it, and return whether there is one; `agent`: torchrun's."""
    if (there := _store(agent=agent)) is not None:
        there.set(key, text)
    return there is not None


def addresses(given: str | Sequence[str] | None, servers: int, seconds: float) -> list[str]:
    """Return each server's address, given or awaited from the store.

    Raises ValueError if there are not as many, or none; ServerError if no server has announced itself in time.
    """
    if given is not None:
        found = [given] if isinstance(given, str) else list(given)
        if len(found) != servers:
            raise ValueError(f"address has {len(found)} addresses for {servers} servers; expected one for each")
        return found
    if not (found := awaited([_ADDRESS.format(index) for index in range(servers)], seconds)):
        raise ValueError("no address: pass host:port of each server, or start servers and trainers with torchrun")
    return found


def awaited(keys: list[str], seconds: float, *, agent: bool = False) -> list[str]:
    """Return what is in the job's store, nothing if there is none; `agent`: only in torchrun's. Or ServerError."""
    try:
        if (there := _store(agent=agent, seconds=seconds)) is None:
            return []
        there.wait(keys, timedelta(seconds=seconds))
    except dist.DistError as error:
        raise ServerError(
            f"no server has put {keys[0]} into torchrun's store within {seconds:g} s: start it first, or have connect "
            "wait for it, with reconnect=, in seconds"
        ) from error
    return [there.get(key).decode() for key in keys]


def _store(*, agent: bool = False, seconds: float = 1800.0) -> dist.distributed_c10d.Store | None:
    """Return the job's store, if there is one; `agent`: only torchrun's, as rank 0 may never make another."""
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        return None
    if agent and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    if not _stores:
        _stores.append(next(rendezvous("env://", timeout=timedelta(seconds=seconds)))[0])
    return _stores[0]

"""Where servers are: as host:port, or through the store that torchrun's environment names."""

import ipaddress
import os
from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

_KEY, _TICKET = "thinwire/server/{}", "thinwire/ticket/{}"
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


def place(index: int | None, servers: int) -> int:
    """Return which of the servers this is: `index`, or else the rank. Raises ValueError if there are not so many."""
    found = int(os.environ.get("RANK", 0)) if index is None else index
    if found >= servers:
        raise ValueError(
            f"this is server {found} of {servers}, counted from 0: pass index= and servers=, or serve on the first "
            f"{servers} ranks and connect on the others"
        )
    return found


def check_unannounced(index: int) -> None:
    """Raise ValueError if this process has announced a server already: trainers would look for the first."""
    if index in _announced and _has_store():
        raise ValueError(
            "this process has served before in this torchrun job, and trainers find its first server only: pass "
            "address= to serve and to connect"
        )


def announce(index: int, address: str) -> None:
    """Tell the environment's store where a server is, if there is one."""
    if _has_store():
        _store().set(_KEY.format(index), address)
        _announced.add(index)


def store_ticket(index: int, text: str) -> None:
    """Give torchrun's store a server's ticket, if there is one: whoever reaches the store can read it."""
    if _has_agent():
        _store().set(_TICKET.format(index), text)


def stored_ticket(index: int) -> str | None:
    """Return a server's ticket, awaited from torchrun's store; None without one."""
    return _store().get(_TICKET.format(index)).decode() if _has_agent() else None


def is_loopback(host: str) -> bool:
    """Whether only this host reaches that address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def addresses(given: str | Sequence[str] | None, servers: int) -> list[str]:
    """Return each server's address, given or awaited from the store; ValueError if not as many, or without any."""
    if given is not None:
        found = [given] if isinstance(given, str) else list(given)
        if len(found) != servers:
            raise ValueError(f"address has {len(found)} addresses for {servers} servers; expected one for each")
        return found
    if not _has_store():
        raise ValueError("no address: pass host:port of each server, or start servers and trainers with torchrun")
    return [_store().get(_KEY.format(index)).decode() for index in range(servers)]


def _has_store() -> bool:
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()


def _has_agent() -> bool:
    """Whether torchrun's agent hosts the store: any other is there only if rank 0 has made it."""
    return _has_store() and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _store() -> dist.distributed_c10d.Store:
    if not _stores:
        store, _, _ = next(rendezvous("env://"))
        _stores.append(store)
    return _stores[0]

"""A process that works through rows of a section: `python -m thinwire_lab.check.worker SPEC`.

A process of its own, because a kernel may hang, or spoil a GPU for all that its process does later. Ranks agree after
each row, through a store, whether it went well on all of them. If not, all of them end, and go on with the next row in
new processes and a new group.
"""

import json
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore  # torch.distributed has them, its stubs do not

from thinwire_lab.check import about
from thinwire_lab.check.exchanges import check_exchange
from thinwire_lab.check.findings import first_line, looked_into
from thinwire_lab.check.kernels import Limits, check_kernel
from thinwire_lab.check.sections import Section
from thinwire_lab.check.speed import check_speed
from thinwire_lab.check.training import check_recipe
from thinwire_lab.cluster.worker import Channel

Handler = Callable[["Spec", str, torch.device, dict[str, Any]], tuple[bool | None, str]]
"""Says how a row went, and fills in figures."""

HANDLERS: Mapping[str, Handler] = MappingProxyType(
    {
        "machine": lambda spec, row, device, _: about.ROWS[row](device),
        "kernels": lambda spec, row, device, into: check_kernel(row, device, Limits(**spec.section.options), into),
        "speed": lambda spec, row, device, into: check_speed(row, device, spec.section.options["size"], into),
        "exchanges": lambda spec, row, device, into: check_exchange(row, device, into),
        "recipes": lambda spec, row, device, into: check_recipe(row, device, spec.section.options["steps"], into),
    }
)


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What a process is to do. start: the first row. pipe: the descriptor it reports to. store: host and port."""

    section: Section
    start: int
    device: str
    threads: int
    pipe: int
    rank: int
    store: tuple[str, int]
    prefix: str

    def status(self, row: int, rank: int) -> str:
        """Return the store's key for how a row went on a rank."""
        return f"{self.prefix}/{self.section.title}/{row}/{rank}"


def connect(host: str, port: int, *, serve: bool = False, patience: float = 60.0) -> TCPStore:
    """Return a store that all ranks share."""
    return TCPStore(host, port, is_master=serve, wait_for_workers=False, timeout=timedelta(seconds=patience))


def work(spec: Spec, out: Channel) -> None:
    """Do rows from `spec.start` on, until one fails that others must not follow. Report each."""

    def emit(**message: Any) -> None:
        out.send(message)

    device, section = torch.device(spec.device), spec.section
    emit(begin=spec.start)
    try:
        store = _join(spec, device)
    except Exception as error:
        emit(unjoined=first_line(error))
        return
    for row, name in enumerate(section.rows[spec.start :], spec.start):
        emit(begin=row)
        found = looked_into(section.title, name, partial(HANDLERS[section.kind], spec, name, device))
        emit(found=asdict(found))
        if not _agreed(spec, store, row, found.ok is not False) or _spoilt(device):
            emit(next=row + 1)
            return
    emit(next=len(section.rows))


def _join(spec: Spec, device: torch.device) -> Store | None:
    """Join the group, if it takes one. Return the store by which ranks agree."""
    torch.set_num_threads(spec.threads)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    section = spec.section
    if not section.backend:
        return None
    store = connect(*spec.store, patience=section.limit + 30)
    dist.init_process_group(
        section.backend,
        store=PrefixStore(f"{spec.prefix}/{section.title}/group of {spec.start}", store),
        rank=spec.rank,
        world_size=section.world,
        timeout=timedelta(seconds=min(30.0, section.limit)),
    )
    return store


def _agreed(spec: Spec, store: Store | None, row: int, well: bool) -> bool:
    """Return whether a row went well on all ranks."""
    if store is None:
        return True
    store.set(spec.status(row, spec.rank), "well" if well else "failed")
    return {store.get(spec.status(row, rank)) for rank in range(spec.section.world)} == {b"well"}


def _spoilt(device: torch.device) -> bool:
    """Whether the device can no longer be used by this process."""
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)
        torch.ones(1, device=device).item()
    except RuntimeError:
        return True
    return False


def main() -> None:
    """Do what the command line says, and end without waiting for a group that may hang."""
    told = json.loads(sys.argv[1])
    spec = Spec(**told | {"section": Section(**told["section"])})
    code = 1
    try:
        work(spec, Channel(socket.socket(fileno=spec.pipe)))
        time.sleep(0.05)  # threads of collectives release what they hold
        code = 0
    except BaseException as error:
        print(first_line(error), file=sys.stderr)
        raise
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()

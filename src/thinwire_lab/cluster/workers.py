"""Workers, started by our own cluster or by torchrun, and the process group that they form."""

import functools
import inspect
import os
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext
from queue import SimpleQueue
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from thinwire.collectives import Group
from thinwire_lab.cluster.link import INTERFACE_VARIABLE, Rate
from thinwire_lab.cluster.local import Cluster, SupervisorDied, WorkerDied
from thinwire_lab.cluster.star import address
from thinwire_lab.cluster.worker import Emit, Handler

_DIED, _INTERRUPTED = 1, 130


def ended(work: Callable[[], None]) -> tuple[int, str | None]:
    """Do the work. Return the command's exit code, and what cut the work short, if anything."""
    try:
        work()
    except KeyboardInterrupt:
        return _INTERRUPTED, "interrupted"
    except WorkerDied as death:
        return _DIED, f"{death}\n{death.reason}" if "\n" in death.reason.strip() else str(death)
    except SupervisorDied as death:
        return _DIED, str(death)
    return 0, None


def in_group() -> bool:
    """Whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def is_first() -> bool:
    """Whether this process is the one that prints."""
    return not in_group() or os.environ["RANK"] == "0"


def world_size() -> int:
    """Return the size of the group that torchrun made."""
    return int(os.environ["WORLD_SIZE"])


class ThisGroup:
    """Runs every job in this process of the group; each rank sees its own events, as rank 0's."""

    label = "UNTHROTTLED: the network that torchrun was started on, as it is"
    throttled = False

    def __init__(self, handler: Callable[[dict[str, Any], Emit], None]) -> None:
        self._handler = handler

    def run(self, job: dict[str, Any]) -> Iterator[tuple[int, dict[str, Any]]]:
        """Run the job and yield its events as they come."""
        events: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
        with ThreadPoolExecutor(1) as thread:
            done: Future[None] = thread.submit(self._handler, job, events.put)
            done.add_done_callback(lambda _: events.put(None))
            while (event := events.get()) is not None:
                yield 0, event
            done.result()

    def throttle(self, on: bool) -> None:
        """Leave the network as it is: it is the user's, not an emulated one."""


Workers = Cluster | ThisGroup
"""Workers that run jobs."""


def started(count: int, rate: Rate | None, handler: Handler, island: int = 1) -> AbstractContextManager[Workers]:
    """Return workers that run `handler`, of which `island` neighbours share a link; under torchrun, its group."""
    if in_group():
        return nullcontext(ThisGroup(handler))
    return Cluster(count, rate, f"{handler.__module__}:{handler.__name__}", island=island)


@functools.cache
def join_group(world: int | None = None) -> None:
    """Join the process group that the environment describes, or of its first `world` ranks alone; once."""
    few = {} if world is None else {"rank": int(os.environ["RANK"]), "world_size": world}
    dist.init_process_group("gloo", **few)  # type: ignore[arg-type]  # both are int


def host(rank: int) -> str:
    """Return the address at which a worker of our own cluster can listen, and others find it."""
    return address(rank) if INTERFACE_VARIABLE in os.environ else "127.0.0.1"


def free_ports(number: int) -> list[int]:
    """Return ports that nobody has on this machine, nor on links of their own."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(number)]
        return [each.getsockname()[1] for each in sockets]


@functools.cache
def mesh(neighbours: int, names: tuple[str, str] = ("replica", "stage")) -> DeviceMesh:
    """Return the workers as replicas × so many neighbours, which hold a replica together."""
    return init_device_mesh("cpu", (dist.get_world_size() // neighbours, neighbours), mesh_dim_names=names)


def wrapped(
    module: nn.Module, *, bucket_cap_mb: float | None = None, group: Group | None = None
) -> DistributedDataParallel:
    """Wrap a module the way the bench trains it, unless its script has done so."""
    if isinstance(module, DistributedDataParallel):
        return module
    return DistributedDataParallel(
        module, gradient_as_bucket_view=True, bucket_cap_mb=bucket_cap_mb, process_group=group, **_without_buffer_sync()
    )


def _without_buffer_sync() -> dict[str, Any]:
    """Name the option by which DDP leaves BatchNorm's buffers alone: it changed after torch 2.12."""
    options = inspect.signature(DistributedDataParallel).parameters
    return {"forward_sync_buffers" if "forward_sync_buffers" in options else "broadcast_buffers": False}

"""What each worker of `thinwire_lab.papers.shared.sweep` does: collectives and ping-pong."""

import functools
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire_lab.cluster.worker import Emit

LEAD = 0.05  # seconds for all ranks to settle before they start together


def handle(job: dict[str, Any], emit: Emit) -> None:
    """Join the group at the first job, then do the job."""
    _join()
    TASKS[job.pop("task")](emit, **job)


@functools.cache
def _join() -> None:
    dist.init_process_group("gloo")


def _collective(emit: Emit, *, kind: str, nbytes: int, repeats: int) -> None:
    """Emit when this rank started and ended each repeat of a collective over so many bytes a rank."""
    for repeat in range(repeats + 1):
        call = COLLECTIVES[kind](torch.ones(nbytes // 4))
        moment = torch.tensor([time.perf_counter() + LEAD], dtype=torch.float64)
        dist.all_reduce(moment, op=dist.ReduceOp.MAX)
        time.sleep(max(0.0, moment.item() - time.perf_counter()))
        start = time.perf_counter()
        call()
        if repeat:
            emit({"repeat": repeat, "start": start, "end": time.perf_counter()})


def _all_gather(x: Tensor) -> Callable[[], object]:
    rows = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    return lambda: dist.all_gather(rows, x)


COLLECTIVES: dict[str, Callable[[Tensor], Callable[[], object]]] = {
    "all-reduce": lambda x: lambda: dist.all_reduce(x),
    "all-gather": _all_gather,
}


def _ping(emit: Emit, *, sizes: list[int], repeats: int) -> None:
    """Between ranks 0 and 1, emit the one-way seconds of messages of these sizes, after a warm-up message."""
    rank = dist.get_rank()
    for number, size in enumerate(sizes[:1] + sizes * repeats if rank < 2 else []):
        message, start = torch.zeros(size, dtype=torch.uint8), time.perf_counter()
        for sender in (0, 1):
            (dist.send if sender == rank else dist.recv)(message, 1 - rank)
        if rank == 0 and number:
            emit({"bytes": size, "seconds": (time.perf_counter() - start) / 2})
    dist.barrier()


TASKS: dict[str, Callable[..., None]] = {"collective": _collective, "ping": _ping}

"""Rounds that all workers of a cluster begin together, and what they time; ping-pong between two of them."""

import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from thinwire_lab.cluster.local import Cluster
from thinwire_lab.cluster.worker import Emit


def start_together(lead: float) -> None:
    """Wait until all ranks go on, by the clock, as a barrier's messages would count as the round's; `lead` seconds."""
    moment = torch.tensor([time.perf_counter() + lead], dtype=torch.float64)
    dist.all_reduce(moment, op=dist.ReduceOp.MAX)
    time.sleep(max(0.0, moment.item() - time.perf_counter()))


def ping(emit: Emit, *, sizes: list[int], repeats: int) -> None:
    """Between ranks 0 and 1, emit the one-way seconds of messages of these sizes, after a warm-up message."""
    rank = dist.get_rank()
    for number, size in enumerate(sizes[:1] + sizes * repeats if rank < 2 else []):
        message = torch.zeros(size, dtype=torch.uint8)
        start = time.perf_counter()
        for sender in (0, 1):
            (dist.send if sender == rank else dist.recv)(message, 1 - rank)
        if rank == 0 and number:
            emit({"bytes": size, "seconds": (time.perf_counter() - start) / 2})
    dist.barrier()


def events(cluster: Cluster, **job: Any) -> list[Mapping[str, Any]]:
    """Return what all workers emit in a job, in the order in which it comes."""
    return [event for _, event in cluster.run(job)]


def durations(rounds: Iterable[Mapping[str, Any]]) -> list[float]:
    """Return each repeat's time from the start of the last rank to the end of the last."""
    repeats = defaultdict(list)
    for event in rounds:
        repeats[event["repeat"]].append(event)
    return [max(e["end"] for e in ranks) - max(e["start"] for e in ranks) for ranks in repeats.values()]

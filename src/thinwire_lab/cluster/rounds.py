"""Rounds that all workers of a cluster begin together, and what they time; ping-pong between two of them."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from thinwire_lab.cluster.local import Cluster
from thinwire_lab.cluster.worker import Emit, Handler
from thinwire_lab.cluster.workers import join_group

PINGS = [1_000, 16_000, 64_000, 256_000, 1_000_000, 4_000_000]
"""Bytes of the messages of `ping`."""


def doing(**tasks: Callable[..., None]) -> Handler:
    """Return a worker's handler: it joins the group at the first job, and then does the task that a job names."""

    def handle(job: dict[str, Any], emit: Emit) -> None:
        join_group()
        tasks[job.pop("task")](emit, **job)

    return handle


def start_together(lead: float) -> None:
    """Wait until all ranks go on, by the clock, as a barrier's messages would count as the round's; `lead` seconds."""
    moment = torch.tensor([time.perf_counter() + lead], dtype=torch.float64)
    dist.all_reduce(moment, op=dist.ReduceOp.MAX)
    time.sleep(max(0.0, moment.item() - time.perf_counter()))


def ping(emit: Emit, *, repeats: int) -> None:
    """Between ranks 0 and 1, emit the one-way seconds of messages of `PINGS`, after a warm-up message."""
    rank = dist.get_rank()
    for number, size in enumerate(PINGS[:1] + PINGS * repeats if rank < 2 else []):
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


def straight(x: Sequence[float], y: Sequence[float]) -> tuple[float, float, float]:
    """Return the slope and intercept of a line, and the share of the variance that it explains."""
    places, values = np.asarray(x, np.float64), np.asarray(y, np.float64)
    slope, intercept = np.polyfit(places, values, 1)
    rest, around = values - (intercept + slope * places), values - values.mean()
    return float(slope), float(intercept), 1 - float(rest @ rest) / float(around @ around)


def line(pings: Iterable[Mapping[str, Any]]) -> tuple[float, float, float]:
    """Return seconds a byte, latency and R² of ping-pong, from the median time of every size.

    The intercept is not the latency, because links let the first bytes pass for free. The latency is the time of the
    smallest message, less the time for its bytes.
    """
    times = defaultdict[int, list[float]](list)
    for ping in pings:
        times[ping["bytes"]].append(ping["seconds"])
    sizes = sorted(times)
    medians = [median(times[size]) for size in sizes]
    slope, _, r2 = straight(sizes, medians)
    return slope, max(0.0, medians[0] - slope * sizes[0]), r2

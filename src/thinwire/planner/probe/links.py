"""What does a message cost? Latency α and inverse bandwidth β of each transport, fitted to a few sizes."""

import os
import socket
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.collectives import Group, Peers, all_gather, all_reduce
from thinwire.exchanges import AllGather, AllReduce, Exchange, Link, Transport
from thinwire.planner.probe.measure import gathered, synchronize

SIZES = (1 << 8, 1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22)
"""Bytes of the vectors that are sent."""
_REPEATS, _PINGS = 4, 3
_FREE = Link(latency=0.0, bandwidth=1e15)  # for a single rank


class Links(NamedTuple):
    """Per transport: `links` fits the time of messages, `busy` the processor seconds that a rank spends on them.

    A message of n bytes takes latency + n / bandwidth seconds.
    """

    links: Mapping[Transport, Link]
    busy: Mapping[Transport, Link]


def probe_links(
    group: Group, device: torch.device, *, seconds: float = 4.0, sizes: Sequence[int] = SIZES, repeats: int = _REPEATS
) -> Links:
    """Time collectives and messages between neighbours. A collective; it leaves out sizes that exceed `seconds`."""
    if group.size() == 1:
        return Links(dict.fromkeys(_RUNS, _FREE), {})
    found = {name: _probe(name, group, device, seconds / len(_RUNS), sizes, repeats) for name in _RUNS}
    return Links({name: pair[0] for name, pair in found.items()}, {name: pair[1] for name, pair in found.items()})


def ping(nbytes: int, group: Group, device: torch.device) -> float:
    """Return the seconds of an all-reduce of so many bytes: the best of a few, on the fastest rank. A collective."""
    run = _reduce(torch.zeros(-(-nbytes // 4), device=device), group)
    gathered([0.0], group, device)  # start together
    return float(gathered([min(_timed(run, device)[0] for _ in range(_PINGS))], group, device).min())


def contention(group: Group, device: torch.device) -> float:
    """How many seconds does a processor second of communication delay computing? A collective.

    0 where backward runs on another device or leaves cores free.
    """
    host = float(zlib.crc32(socket.gethostname().encode()))
    ranks = gathered([host], group, device)[:, 0].eq(host).sum().item()
    load = ranks * torch.get_num_threads() / (os.cpu_count() or 1)
    return float(gathered([load if device.type == "cpu" and load >= 1 else 0.0], group, device).max())


def _probe(
    name: Transport, group: Group, device: torch.device, seconds: float, sizes: Sequence[int], repeats: int
) -> tuple[Link, Link]:
    left, walls, busies = seconds, list[tuple[int, float]](), list[tuple[int, float]]()
    for size in sizes:
        run = _RUNS[name](torch.zeros(size, dtype=torch.uint8, device=device).view(torch.float32), group)
        timed = [_timed(run, device) for _ in range(repeats + 1)][1:]
        wall, busy = map(median, zip(*timed, strict=True))
        rows = gathered([wall, busy, sum(w for w, _ in timed)], group, device)
        walls.append((size, float(rows[:, 0].mean())))
        busies.append((size, float(rows[:, 1].mean())))
        left -= float(rows[:, 2].max())
        if left < 3 * float(rows[:, 2].max()):  # the next size takes about as many times longer
            break
    exchange, world_size = _LIKE[name], group.size()
    return fit(walls, exchange, world_size), fit(busies, exchange, world_size)


def fit(points: Sequence[tuple[int, float]], exchange: Exchange | None, world_size: int) -> Link:
    """Return the link on which the exchange (a single message, if None) takes these (bytes, seconds).

    β is the median slope between the three largest sizes, and α the median of the remainder at the others. A traffic
    shaper may favour or delay a small message; no single message should tilt the line.
    """
    count, share = 1.0, 1.0
    if exchange is not None:
        (hops,) = exchange.hops(1.0, world_size)
        count, share = hops.count, hops.nbytes
    times = [seconds / count for _, seconds in points]
    sizes = [share * size for size, _ in points]
    large = list(zip(sizes, times, strict=True))[-3:]
    slopes = [(high - low) / (more - less) for (less, low), (more, high) in combinations(large, 2)]
    slope = max(median(slopes) if slopes else 0.0, 1 / _FREE.bandwidth)
    latency = max(0.0, median(time - slope * size for time, size in zip(times[:-1] or times, sizes, strict=False)))
    return Link(latency=latency, bandwidth=1 / slope)


def _timed(run: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """Return the seconds by the clock, and the processor seconds of this process."""
    synchronize(device)
    start, busy = time.perf_counter(), time.process_time()
    run()
    synchronize(device)
    return time.perf_counter() - start, time.process_time() - busy


def _reduce(x: Tensor, group: Group) -> Callable[[], object]:
    return lambda: all_reduce(x, group).wait()


def _gather(x: Tensor, group: Group) -> Callable[[], object]:
    out = x.new_empty(group.size() * x.numel())
    return lambda: all_gather(out, x, group).wait()


def _shift(x: Tensor, group: Group) -> Callable[[], object]:
    """Send to the next rank while the one before sends here."""
    peers, message = Peers(group, x.device), x.view(torch.uint8)
    after, before = (peers.rank + 1) % peers.world_size, (peers.rank - 1) % peers.world_size
    return lambda: peers.cross({after: message}, {before: message.numel()})


_RUNS: Mapping[Transport, Callable[[Tensor, Group], Callable[[], object]]] = {
    "all_reduce": _reduce,
    "all_gather": _gather,
    "point_to_point": _shift,
}
_LIKE: Mapping[Transport, Exchange | None] = {
    "all_reduce": AllReduce(),
    "all_gather": AllGather(),
    "point_to_point": None,
}

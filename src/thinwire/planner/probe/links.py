"""What does a message cost, and are some ranks nearer? Latency α and inverse bandwidth β, fitted to a few sizes."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import combinations
from statistics import median, median_low
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.collectives import Group, Peers, all_gather, all_reduce
from thinwire.exchanges import AllGather, AllReduce, Exchange, Link, Transport
from thinwire.planner.probe.measure import gathered, hosts, longest, synchronize, timed

SMALLEST, USUAL, LARGEST = 1 << 8, 1 << 22, 1 << 26
"""Bytes of the first message, of the last one where time allows, and of the last one where latency is long."""
_REPEATS, _PINGS = 5, 3
_SIZES = 8  # from the smallest to the usual
_TRIPS = 20  # as many small messages' time may go by until bytes take longer than latency
_LEAPS = (64, 16, 4)  # from a size to the next; each takes at most 2.6 times the smallest message's time
_TOLD, _NOISE = 0.2, 0.05  # of a message's time: what its bytes take at least; what equal messages may differ by
_FREE = Link(latency=0.0, bandwidth=1e15)  # for a single rank


class Links(NamedTuple):
    """Per transport, the time of messages and the processor seconds that they keep one rank `busy`: latency + n /
    bandwidth.
    """

    links: Mapping[Transport, Link]
    busy: Mapping[Transport, Link]
    unseen: Mapping[Transport, int]


class Sent(NamedTuple):
    """A message of so many bytes: its seconds by the clock, and processor seconds. The same figures on all ranks."""

    size: int
    wall: float
    busy: float = 0.0


def probe_links(group: Group, device: torch.device, *, seconds: float = 4.0, most: int = LARGEST) -> Links:
    """Time collectives and messages up to `most` bytes for `seconds`, or some sixty small messages; a collective."""
    if group.size() == 1:
        return Links(dict.fromkeys(_WAYS, _FREE), {}, {})
    share, largest = seconds / len(_WAYS), max(USUAL, most)
    # what is gathered takes as many times the memory as there are ranks
    most_of = {name: max(USUAL, largest // group.size()) if name == "all_gather" else largest for name in _WAYS}
    sent = {name: ladder(_sender(name, group, device), share, most_of[name]) for name in _WAYS}
    world_size = group.size()
    return Links(
        {name: fit([(s.size, s.wall) for s in each], _WAYS[name][1], world_size) for name, each in sent.items()},
        {name: fit([(s.size, s.busy) for s in each], _WAYS[name][1], world_size) for name, each in sent.items()},
        {name: each[-1].size for name, each in sent.items() if not told([s.wall for s in each])},
    )


def ladder(send: Callable[[int, int], Sent], seconds: float, most: int = LARGEST) -> list[Sent]:
    """Send ever larger messages until bytes take longer than the latency, few times each where a trip is long.

    Sizes go up to 4 MiB if `seconds` suffice, and up to `most` while bytes take no longer than the latency.
    """
    first = send(SMALLEST, 2)
    runs = max(2, min(_REPEATS, int(seconds / (_SIZES * first.wall)))) if first.wall else _REPEATS
    sent, spent = [first if runs == 2 else send(SMALLEST, runs)], (2 + (runs if runs > 2 else 0)) * first.wall
    patience = max(seconds, _TRIPS * sent[0].wall)
    while True:
        trip, last = sent[0].wall, sent[-1]
        outweighed = last.wall >= 2 * trip
        if outweighed and (runs < _REPEATS or last.size >= USUAL):
            return sent
        bytes_take = max(0.0, last.wall - trip)
        leaps = [leap for leap in _LEAPS if leap == 4 or (runs < _REPEATS and bytes_take * leap <= 1.6 * trip)]
        size = min(last.size * leaps[0], most)
        expected = max(last.wall, trip + bytes_take * size / last.size)
        fits = int(((seconds if outweighed else patience) - spent) / expected) if expected else _REPEATS
        if size == last.size or fits < 2:
            return sent
        sent.append(send(size, min(runs, fits)))
        spent += min(runs, fits) * sent[-1].wall


def told(seconds: Sequence[float]) -> bool:
    """Whether the bytes of the largest message explain more of its time than noise does."""
    return seconds[-1] - seconds[0] >= _TOLD * seconds[-1] > 0


def fit(points: Sequence[tuple[int, float]], exchange: Exchange | None, world_size: int) -> Link:
    """Return the link on which the exchange (a single message, if None) takes these (bytes, seconds).

    β is the median slope between the three largest sizes, and α the median of the remainder at the others. A traffic
    shaper may favour or delay a small message; no single message should tilt the line. Where the time does not depend
    on the bytes, the bandwidth is the lowest that fits: what was not measured is not free.
    """
    count, share = 1.0, 1.0
    if exchange is not None:
        (hops,) = exchange.hops(1.0, world_size)
        count, share = hops.count, hops.nbytes
    times = [seconds / count for _, seconds in points]
    sizes = [share * size for size, _ in points]
    if len(sizes) == 1:
        slope = times[0] / sizes[0]  # all of it may be bytes
    else:
        large = list(zip(sizes, times, strict=True))[-3:]
        slope = median((high - low) / (more - less) for (less, low), (more, high) in combinations(large, 2))
        rise, run = max(0.0, times[-1] - times[0]), sizes[-1] - sizes[0]
        hidden = _NOISE * (times[-1] - rise / _TOLD)  # in noise; the less, the more bytes tell: no jump where they do
        slope = max(slope, rise / run / 2 if told(times) else (rise + hidden) / run)
    latency = max(0.0, median(time - slope * size for time, size in zip(times[:-1] or times, sizes, strict=False)))
    return Link(latency=latency, bandwidth=1 / slope if slope else _FREE.bandwidth)


def ping(nbytes: int, group: Group, device: torch.device) -> float:
    """Return the seconds of an all-reduce of so many bytes: the best of a few, on the fastest rank. A collective."""
    run = _reduce(torch.zeros(-(-nbytes // 4), dtype=torch.float32, device=device), group)
    gathered([0.0], group, device)  # start together
    return float(gathered([min(_timed(run, device)[0] for _ in range(_PINGS))], group, device).min())


def contention(group: Group, device: torch.device) -> float:
    """How many seconds does a processor second of communication delay computing? 0 if cores are free; a collective."""
    every = hosts(group, device)
    ranks = every.count(every[group.rank()])
    load = ranks * torch.get_num_threads() / (os.cpu_count() or 1)
    return float(gathered([load if device.type == "cpu" and load >= 1 else 0.0], group, device).max())


def _sender(name: Transport, group: Group, device: torch.device) -> Callable[[int, int], Sent]:
    def send(size: int, runs: int) -> Sent:
        run = _WAYS[name][0](torch.zeros(-(-size // 4), dtype=torch.float32, device=device), group)
        columns = zip(*(_timed(run, device) for _ in range(runs)), strict=True)
        # of two the lesser, as the first may set up a connection or find a narrow window
        wall, busy = gathered([median_low(column) for column in columns], group, device).mean(dim=0).tolist()
        return Sent(size, wall, busy)

    return send


def _timed(run: Callable[[], object], device: torch.device) -> tuple[float, float]:
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
    peers, message = Peers(group, x.device), x.view(torch.uint8)
    after, before = (peers.rank + 1) % peers.world_size, (peers.rank - 1) % peers.world_size
    return lambda: peers.cross({after: message}, {before: message.numel()})


_WAYS: Mapping[Transport, tuple[Callable[[Tensor, Group], Callable[[], object]], Exchange | None]] = {
    "all_reduce": (_reduce, AllReduce()),
    "all_gather": (_gather, AllGather()),
    "point_to_point": (_shift, None),
}


_COMPARED = (1 << 8, 1 << 18)  # bytes, at which tiers are compared
_SECONDS = 0.5  # for the pairs at one distance
_APART = 3.0  # times slower: another tier


class Tier(NamedTuple):
    """Groups of `size` neighbouring ranks, whose messages see `link`; `told`: its bandwidth could be told."""

    size: int
    link: Link
    same_host: bool
    told: bool = True


def probe_tiers(group: Group, device: torch.device) -> list[Tier]:
    """Return tiers, the nearest first, of ranks numbered host by host, as torchrun does; a collective."""
    every = hosts(group, device)
    strides = [1 << bit for bit in range((group.size() - 1).bit_length())]
    found = [(stride, _pairs(stride, group, device)) for stride in strides]
    tiers: list[Tier] = []
    for stride, (link, seen) in found:
        together = all(every[i] == every[i ^ stride] for i in range(len(every)) if i ^ stride < len(every))
        tier = Tier(min(2 * stride, group.size()), link, together, seen)
        if tiers and all(link.seconds(size) <= _APART * tiers[-1].link.seconds(size) for size in _COMPARED):
            near = tiers.pop()
            tier = near._replace(size=tier.size, same_host=near.same_host and together)
        tiers.append(tier)
    return tiers


def described(tiers: list[Tier]) -> list[str]:
    """Return a line for each tier."""
    return [
        f"groups of {tier.size} ranks {'on one host' if tier.same_host else 'across hosts'}: latency "
        f"{1e3 * tier.link.latency:.2f} ms, bandwidth {'' if tier.told else 'at least '}"
        f"{8e-6 * tier.link.bandwidth:.0f} Mbit/s"
        for tier in tiers
    ]


def _pairs(stride: int, group: Group, device: torch.device) -> tuple[Link, bool]:
    """Return the link of the slowest pair of ranks at this distance, and whether bytes told in it."""
    peers = Peers(group, device)
    peer = peers.rank ^ stride

    def send(size: int, runs: int) -> Sent:
        message = torch.zeros(size, dtype=torch.uint8, device=device)
        longest(0.0, group, device)
        swap = partial(peers.cross, {peer: message}, {peer: message.numel()})
        taken = [0.0] if peer >= peers.world_size else [timed(swap, device) for _ in range(runs)]
        return Sent(size, longest(median_low(taken), group, device))

    sent = ladder(send, _SECONDS, USUAL)
    return fit([(s.size, s.wall) for s in sent], None, 2), told([s.wall for s in sent])

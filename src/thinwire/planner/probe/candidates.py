"""Measuring what candidates cost, by the size of the tensor."""

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from thinwire import trace
from thinwire.collectives import Group
from thinwire.exchanges import AllGather, Transport
from thinwire.exchanges.base import Link
from thinwire.payloads import Payload
from thinwire.planner.candidates import Candidate
from thinwire.planner.probe.measure import gathered, longest, timed
from thinwire.planner.profile import Cost, Curve
from thinwire.reducer import Bucket, Compressed, Round, Segment

_REPEATS, _LEAST = 5, 2  # steps of each size; the least of them where a trip is long, and of sizes
_PART = 8  # of the time of a candidate, one step's bytes take at most
_MOST_SEGMENTS = 8  # in the timed bucket, because tensors share the cost of a call
_MOST_ELEMENTS = 1 << 22
_CACHE = 1 << 25  # bytes, enough to evict everything from it
_ROWS = (2, 10)  # payloads decoded at once, to see what each costs


def probe_candidates(
    candidates: Iterable[Candidate],
    group: Group,
    device: torch.device,
    links: Mapping[Transport, Link],
    sizes: Sequence[int],
    *,
    seconds: float = 6.0,
) -> dict[str, Cost]:
    """Time candidates on random gradients of some of the `sizes`, within their shares of `seconds`; a collective."""
    chosen = [candidate for candidate in candidates if candidate.name != "dense"]
    share = seconds / max(1, len(chosen))
    return {candidate.name: _cost(candidate, group, device, links, _spread(sizes), share) for candidate in chosen}


def _spread(sizes: Sequence[int], count: int = 4) -> list[int]:
    """Return a few sizes in about equal ratios: the smallest first, then from the largest down."""
    ordered = sorted({min(max(1, size), _MOST_ELEMENTS) for size in sizes})
    low, high = ordered[0], ordered[-1]
    wanted = [low * (high / low) ** (i / (count - 1)) for i in range(count)]
    spread = sorted({min(ordered, key=lambda size: abs(size - want)) for want in wanted})
    return [*spread[:1], *spread[:0:-1]]


class _Load(NamedTuple):
    """A bucket of so many tensors of a size, the bytes of each payload, and the seconds that its messages take."""

    size: int
    segments: int
    nbytes: int
    messages: float


def _cost(
    candidate: Candidate,
    group: Group,
    device: torch.device,
    links: Mapping[Transport, Link],
    sizes: Sequence[int],
    seconds: float,
) -> Cost:
    loads = [_load(candidate, size, group.size(), device, links, seconds / _PART) for size in sizes]
    _point(candidate, loads[0], 1, group, device)  # compiles the kernels of a bucket, outside the time that counts
    points: dict[int, list[float]] = {}
    for load in dict.fromkeys(loads):
        if len(points) >= _LEAST and _LEAST * load.messages > seconds:
            break  # of a single size a curve could only guess what calls cost, and what elements do
        repeats = max(_LEAST, min(_REPEATS, int(seconds / (len(sizes) * load.messages)))) if load.messages else _REPEATS
        *point, took = _point(candidate, load, repeats, group, device)
        points[load.size] = point
        seconds -= took
        if len(points) >= _LEAST and seconds < took:
            break
    columns = [Curve.through((size, point[place]) for size, point in points.items()) for place in range(5)]
    encode, decode, each, exchange, nbytes = columns
    return Cost(encode=encode, decode=decode, each=each, exchange=exchange, nbytes=nbytes)


def _load(
    candidate: Candidate,
    size: int,
    world_size: int,
    device: torch.device,
    links: Mapping[Transport, Link],
    seconds: float,
) -> _Load:
    """Return a bucket to time: fewer tensors, and smaller ones, where bytes alone would take longer than `seconds`."""
    link = links[candidate.exchange.transport]

    def messages(segments: int, nbytes: int) -> float:
        whole = max(4.0 * segments * size, segments * nbytes)
        return candidate.exchange.seconds(segments * nbytes, world_size, link, whole)

    segments, trip = max(1, min(_MOST_SEGMENTS, _MOST_ELEMENTS // 4 // size)), messages(1, 0)
    while True:
        nbytes = candidate.codec.encode(_random(size, device)).nbytes
        if messages(segments, nbytes) <= trip + max(trip, seconds) or size == segments == 1:
            return _Load(size, segments, nbytes, messages(segments, nbytes))
        segments, size = (segments // 2, size) if segments > 1 else (1, size // 2)


def _point(
    candidate: Candidate, load: _Load, repeats: int, group: Group, device: torch.device
) -> tuple[float, float, float, float, float, float]:
    """Return, per tensor: seconds to encode, decode, decode one more rank, exchange; bytes; and what that took."""
    start, reducer, segments = time.perf_counter(), candidate.reducer(), load.segments
    steps = [_step(reducer, load.size, segments, step, group, device) for step in range(repeats)]
    mine = [seconds for step in steps for seconds in step]
    rows = gathered([*mine, _each(reducer, load.size, device), time.perf_counter() - start], group, device)
    every = rows[:, :-2].view(group.size(), repeats, 3)
    # Ranks that share processors slow each other down, and all wait for the slowest: it counts. Of the repeats the
    # fastest does: whatever else runs there only ever adds.
    encode, decode, total = every.amax(dim=0).amin(dim=0).tolist()
    each, took = rows[:, -2:].amax(dim=0).tolist()
    extra = max(0.0, total - encode - decode - load.messages)
    return encode / segments, decode / segments, each, extra / segments, float(load.nbytes), took


def _step(
    reducer: Compressed, size: int, segments: int, step: int, group: Group, device: torch.device
) -> tuple[float, float, float]:
    flat = torch.randn(segments * size, dtype=torch.float32, device=device, generator=_generator(device))
    shape = _shape(size)
    places = tuple(Segment(name=f"{i}", offset=i * size, length=size, shape=shape) for i in range(segments))
    at = Round(step=step, group=group, scale=1 / group.size())
    torch.empty(_CACHE, dtype=torch.uint8, device=device).fill_(step)  # as backward leaves it
    longest(0.0, group, device)  # start together, or who is last would have the processors for itself
    with trace.listen(trace.Recorder()) as recorder:
        total = timed(lambda: reducer.reduce(Bucket(flat=flat, segments=places), at).wait(), device)
    for memory in reducer.memories():
        memory.commit()
    return recorder.seconds("encode"), recorder.seconds("decode"), total


def _each(reducer: Compressed, size: int, device: torch.device) -> float:
    """How many seconds longer does decoding take with each further payload?"""
    if not isinstance(reducer.exchange, AllGather):
        return 0.0
    payload = reducer.codec.encode(_random(size, device))
    few, many = (min(_decoding(payload, rows, device) for _ in range(3)) for rows in _ROWS)
    return max(0.0, many - few) / (_ROWS[1] - _ROWS[0])


def _decoding(payload: Payload, count: int, device: torch.device) -> float:
    rows = payload.to_buffer().expand(count, -1).contiguous()
    out = torch.empty(payload.numel, dtype=torch.float32, device=device)
    return timed(lambda: payload.from_buffers(rows).write(out), device)


def _random(size: int, device: torch.device) -> torch.Tensor:
    return torch.randn(_shape(size), dtype=torch.float32, device=device, generator=_generator(device))


def _shape(size: int) -> tuple[int, ...]:
    """Return the shape of a matrix of that size, as square as can be: most large tensors are matrices."""
    rows = next(rows for rows in range(math.isqrt(size), 0, -1) if size % rows == 0)
    return (rows, size // rows) if rows > 1 else (size,)


def _generator(device: torch.device) -> torch.Generator:
    return torch.Generator(device=device).manual_seed(0)

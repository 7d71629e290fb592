"""Measuring what candidates cost, by the size of the tensor."""

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from statistics import median

import torch

from thinwire import trace
from thinwire.collectives import Group
from thinwire.exchanges import AllGather, Transport
from thinwire.exchanges.base import Link
from thinwire.payloads import Payload
from thinwire.planner.candidates import Candidate
from thinwire.planner.probe.measure import gathered, longest, synchronize
from thinwire.planner.profile import Cost, Curve
from thinwire.reducer import Bucket, Compressed, Round, Segment

_REPEATS = 4
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
    """Time each candidate but the uncompressed one, on random gradients of a few of the `sizes`. A collective.

    Sizes at which a candidate would exceed its share of `seconds` are left out.
    """
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


def _cost(
    candidate: Candidate,
    group: Group,
    device: torch.device,
    links: Mapping[Transport, Link],
    sizes: Sequence[int],
    seconds: float,
) -> Cost:
    candidate.reducer().prepare(group, [torch.ones(1 << 12, device=device)])
    _point(candidate, sizes[0], group, device, links)  # compiles the kernels of a bucket, outside the time that counts
    points: list[tuple[int, float, float, float, float, float]] = []
    for size in sizes:
        start = time.perf_counter()
        points.append((size, *_point(candidate, size, group, device, links)))
        took = longest(time.perf_counter() - start, group, device)
        seconds -= took
        if seconds < took:
            break
    columns = [Curve.through((point[0], point[place]) for point in points) for place in range(1, 6)]
    encode, decode, each, exchange, nbytes = columns
    return Cost(encode=encode, decode=decode, each=each, exchange=exchange, nbytes=nbytes)


def _point(
    candidate: Candidate,
    size: int,
    group: Group,
    device: torch.device,
    links: Mapping[Transport, Link],
) -> tuple[float, float, float, float, float]:
    """Return, per tensor of that size: seconds to encode, decode, decode one more rank, exchange; and bytes."""
    reducer = candidate.reducer()
    segments = max(1, min(_MOST_SEGMENTS, _MOST_ELEMENTS // 4 // size))
    nbytes = reducer.codec.encode(_random(size, device)).nbytes
    steps = [_step(reducer, size, segments, step, group, device) for step in range(_REPEATS + 1)][1:]
    rows = gathered([median(column) for column in zip(*steps, strict=True)], group, device)
    encode, decode = rows[:, :2].mean(dim=0).tolist()
    carried = min(rows[:, 2] - rows[:, 0] - rows[:, 1]).item()
    world_size, link = group.size(), links[candidate.exchange.transport]
    messages = candidate.exchange.seconds(
        segments * nbytes, world_size, link, max(4.0 * segments * size, segments * nbytes)
    )
    each = gathered([_each(reducer, size, device)], group, device).mean().item()
    return encode / segments, decode / segments, each, max(0.0, carried - messages) / segments, float(nbytes)


def _step(
    reducer: Compressed, size: int, segments: int, step: int, group: Group, device: torch.device
) -> tuple[float, float, float]:
    """Return the seconds of encoding, decoding, and of all."""
    flat = torch.randn(segments * size, device=device, generator=_generator(device))
    shape = _shape(size)
    places = tuple(Segment(name=f"{i}", offset=i * size, length=size, shape=shape) for i in range(segments))
    at = Round(step=step, group=group, scale=1 / group.size())
    torch.empty(_CACHE, dtype=torch.uint8, device=device).fill_(step)  # as backward leaves it
    longest(0.0, group, device)
    with trace.listen(trace.Recorder()) as recorder:
        synchronize(device)
        start = time.perf_counter()
        reducer.reduce(Bucket(flat=flat, segments=places), at).wait()
        synchronize(device)
        total = time.perf_counter() - start
    for memory in reducer.memories():
        memory.commit()
    return recorder.seconds("encode"), recorder.seconds("decode"), total


def _each(reducer: Compressed, size: int, device: torch.device) -> float:
    """How many seconds longer does decoding take with each further payload?"""
    if not isinstance(reducer.exchange, AllGather):
        return 0.0
    payload = reducer.codec.encode(_random(size, device))
    few, many = (median(_decoding(payload, rows, device) for _ in range(3)) for rows in _ROWS)
    return max(0.0, many - few) / (_ROWS[1] - _ROWS[0])


def _decoding(payload: Payload, count: int, device: torch.device) -> float:
    rows = payload.to_buffer().expand(count, -1).contiguous()
    out = torch.empty(payload.numel, device=device)
    synchronize(device)
    start = time.perf_counter()
    payload.from_buffers(rows).write(out)
    synchronize(device)
    return time.perf_counter() - start


def _random(size: int, device: torch.device) -> torch.Tensor:
    return torch.randn(_shape(size), device=device, generator=_generator(device))


def _shape(size: int) -> tuple[int, ...]:
    """Return the shape of a matrix of that size, as square as can be: most large tensors are matrices."""
    rows = next(rows for rows in range(math.isqrt(size), 0, -1) if size % rows == 0)
    return (rows, size // rows) if rows > 1 else (size,)


def _generator(device: torch.device) -> torch.Generator:
    return torch.Generator(device=device).manual_seed(0)

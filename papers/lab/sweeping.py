"""What each worker of `papers.lab.sweep` does: collectives, and synchronising one tensor by several routes.

Only collectives run on all workers at once. Encoding and decoding are timed on the first alone, as workers share cores.
"""

import functools
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.codecs import Codec, HashedSlots, SampledThreshold
from thinwire.tools.cluster.worker import Emit

LEAD = 0.05  # seconds for all ranks to settle before they start together

Picks = tuple[Tensor, Tensor]
"""Values and their indices."""


def handle(job: dict[str, Any], emit: Emit) -> None:
    """Join the group at the first job, then do the job."""
    _join()
    TASKS[job.pop("task")](emit, **job)


@functools.cache
def _join() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)


def by_topk(x: Tensor, density: float) -> Picks:
    """Exact Top-k by torch."""
    indices = torch.topk(x.abs(), max(1, round(density * x.numel())), sorted=False).indices
    return x[indices], indices.int()


def by_mask(x: Tensor, density: float) -> Picks:
    """DGC's selection: a threshold from a sample of 1 %, a mask, and the places where it is set."""
    sample = x[:: min(100, max(1, x.numel() // 1000))].abs()
    least = torch.topk(sample, max(1, round(density * sample.numel())), sorted=False).values.min()
    indices = (x.abs() >= least).nonzero().view(-1)
    return x[indices], indices.int()


def one_by_one(payloads: Sequence[Picks], numel: int) -> Tensor:
    """Decode each payload to a dense tensor, and add these up."""
    total = torch.zeros(numel)
    for values, indices in payloads:
        total += torch.zeros(numel).index_copy_(0, indices.long(), values)
    return total


def together(payloads: Sequence[Picks], numel: int) -> Tensor:
    """Decode all payloads into one tensor."""
    total = torch.zeros(numel)
    for values, indices in payloads:
        total.index_add_(0, indices.long(), values)
    return total


def _ours(codec: Callable[[float], Codec]) -> Callable[[Emit, Tensor, float, int], None]:
    """Return the route of a codec of this library, whose decoder takes all payloads at once."""

    def route(emit: Emit, x: Tensor, density: float, repeats: int) -> None:
        made = codec(density)
        payload = made.encode(x)
        rows = torch.stack([payload.to_buffer()] * dist.get_world_size())
        emit(
            {
                "bytes": payload.nbytes,
                "encode": _alone(lambda: made.encode(x).to_buffer(), repeats),
                "decode": _alone(lambda: payload.from_buffers(rows).dense(), repeats),
            }
        )

    return route


def _torchs(pick: Callable[[Tensor, float], Picks]) -> Callable[[Emit, Tensor, float, int], None]:
    """Return the route of a selection in plain torch, whose values and indices take 32 bits each."""

    def route(emit: Emit, x: Tensor, density: float, repeats: int) -> None:
        picks = pick(x, density)
        many = [picks] * dist.get_world_size()
        emit(
            {
                "bytes": 8 * picks[0].numel(),
                "encode": _alone(lambda: pick(x, density), repeats),
                "decode": _alone(lambda: together(many, x.numel()), repeats),
                "decode one by one": _alone(lambda: one_by_one(many, x.numel()), repeats),
            }
        )

    return route


ROUTES = {
    "topk": _torchs(by_topk),
    "mask": _torchs(by_mask),
    "sampled": _ours(lambda density: SampledThreshold(density=density)),
    "hashed": _ours(lambda density: HashedSlots(density=density)),
}


def _route(emit: Emit, *, route: str, numel: int, density: float, repeats: int) -> None:
    """On the first rank, emit the seconds of encoding a tensor and of decoding as many payloads as there are ranks."""
    if dist.get_rank() == 0:
        x = torch.randn(numel, generator=torch.Generator().manual_seed(0)) ** 3  # heavy tails, as gradients have
        ROUTES[route](emit, x, density, repeats)
    dist.barrier()


def _alone(call: Callable[[], object], repeats: int) -> float:
    call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return median(times)


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


TASKS: dict[str, Callable[..., None]] = {"route": _route, "collective": _collective, "ping": _ping}

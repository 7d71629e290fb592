"""The workers: they exchange one vector each, and measure the link by ping-pong.

A job and its events are JSON. An exchange is named as in `WAYS`.
"""

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.codecs import BlockTopK, Codec
from thinwire.exchanges import Exchange, OwnerSharded
from thinwire.payloads import Payload
from thinwire.recipes import METHODS
from thinwire_lab.cluster.link import Meter
from thinwire_lab.cluster.rounds import ping, start_together
from thinwire_lab.cluster.worker import Emit
from thinwire_lab.cluster.workers import join_group

LEAD = 0.1  # seconds for all ranks to settle before they start together


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to sum sparse vectors. `exact`: it gives exactly the sum of what the ranks sent."""

    codec: Callable[[float], Codec]
    exchange: Exchange
    exact: bool = True


def _of(method: str, *, exact: bool = True) -> Way:
    """Return the way of a catalogue method."""
    found = METHODS[method]
    return Way(codec=lambda density: found.large(density).codec, exchange=found.large().exchange, exact=exact)


WAYS = {
    "dense": _of("dense"),
    "all-gather": _of("topk"),
    "tree": _of("gtopk", exact=False),
    "doubling": _of("doubling"),
    "owner-sharded": _of("owner"),
    "owner-sharded, blocks": Way(codec=lambda density: BlockTopK(density=density), exchange=OwnerSharded()),
    "union, blocks": _of("s2_union"),
    "sketch, blocks": _of("s2_reducer", exact=False),
}


def handle(job: dict[str, Any], emit: Emit) -> None:
    """Join the group at the first job, then do the job."""
    join_group()
    _TASKS[job.pop("task")](emit, **job)


def vector(rank: int, numel: int) -> Tensor:
    """Return normal float32 numbers, the same for a rank in every job: multiples of 2⁻¹², so that sums are exact."""
    return (torch.randn(numel, generator=torch.Generator().manual_seed(rank)) * 2**12).round() / 2**12


def _measure(emit: Emit, *, way: str, numel: int, density: float, repeats: int) -> None:
    """Emit "round" for every repeat but the first, which warms up, and finally "sum"."""
    chosen, meter = WAYS[way], Meter()
    codec, world = chosen.codec(density), dist.get_world_size()
    mine = codec.encode(vector(dist.get_rank(), numel))
    for repeat in range(repeats + 1):
        event, total = _exchange(chosen.exchange, mine, meter, seed=repeat)
        if repeat:
            emit({"kind": "round", "repeat": repeat, "formula": chosen.exchange.sent_bytes(mine, world)} | event)
    right = None
    if chosen.exact and dist.get_rank() == 0:
        right = torch.equal(total.to(torch.float64), _float64_sum(codec, numel, world))
    digest = hashlib.sha256(total.numpy().tobytes()).hexdigest()
    emit({"kind": "sum", "digest": digest, "right": right, "payload": mine.nbytes})


def _exchange(exchange: Exchange, mine: Payload, meter: Meter, *, seed: int) -> tuple[dict[str, Any], Tensor]:
    """Exchange once."""
    group = dist.group.WORLD
    assert group is not None
    start_together(LEAD)
    meter.skip()
    start = time.perf_counter()
    done = exchange.start(mine, group, seeds=[seed]).wait()
    end = time.perf_counter()
    return {"start": start, "end": end, "declared": done.sent_bytes} | meter.drain(), done.total.dense()


def _float64_sum(codec: Codec, numel: int, world: int) -> Tensor:
    payloads = (codec.encode(vector(rank, numel)) for rank in range(world))
    return torch.stack([payload.dense().to(torch.float64) for payload in payloads]).sum(dim=0)


_TASKS: dict[str, Callable[..., None]] = {"measure": _measure, "ping": ping}

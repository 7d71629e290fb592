"""Does every rank of this very group get the sum of what all have sent? One exchange for each recipe."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.exchanges import AllGather, AllReduce, Exchange, Exchanged, UnionAllReduce
from thinwire.payloads import Payload
from thinwire.recipes import METHODS
from thinwire.trace import ring_bytes
from thinwire_lab.check.findings import Wrong

ROWS = tuple(name for name in METHODS if name != "powersgd")
"""Recipes that encode and exchange. PowerSGD's factors are no payloads."""
_SHAPE = (96, 128)
_SEED = 3
_ROUNDING = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
_FLOAT32 = 1e-5


def check_exchange(name: str, device: torch.device, figures: dict[str, Any]) -> tuple[bool, str]:
    """Encode other numbers on each rank, and exchange them. A collective."""
    line, group = METHODS[name].large(), dist.group.WORLD
    assert group is not None
    codec, rank, size = line.codec.at(0), group.rank(), group.size()
    lots = torch.Generator().manual_seed(rank)
    x = torch.randn(_SHAPE, generator=lots).pow(3).to(device)
    payload = codec.encode(x, seed=_SEED if codec.shared_seed else _SEED + rank)
    line.exchange.prepare(group)
    exchanged = line.exchange.start(payload, group, keep=True, seeds=[_SEED]).wait()
    figures |= {"world_size": size, "sent_bytes": exchanged.sent_bytes, "payload_bytes": payload.nbytes}
    total = exchanged.total.dense()
    _same_everywhere(total)
    figures["error"] = _error(total, exchanged)
    most = math.inf if _is_packed(line.exchange) else _ROUNDING.get(total.dtype, _FLOAT32)
    if not figures["error"] <= most:
        raise Wrong(f"the sum is {figures['error']:.1e} from what all ranks delivered; expected {most:.0e} at most")
    _check_bytes(line.exchange, payload, exchanged.sent_bytes, size)
    estimated = " by a sketch's estimate" if _is_packed(line.exchange) else ""
    return True, f"the same sum on all ranks, {figures['error']:.0e} from what they delivered{estimated}"


def _is_packed(exchange: Exchange) -> bool:
    return isinstance(exchange, UnionAllReduce) and exchange.packed is not None


def _same_everywhere(total: Tensor) -> None:
    """Raise Wrong unless all ranks hold the same bits."""
    ends = [torch.empty_like(total) for _ in range(dist.get_world_size())]
    dist.all_gather(ends, total)
    for rank, theirs in enumerate(ends):
        if not torch.equal(theirs.view(torch.uint8), ends[0].view(torch.uint8)):
            raise Wrong(f"rank {rank} has a different sum from rank 0")


def _error(total: Tensor, exchanged: Exchanged) -> float:
    """Return the distance from the sum of what all delivered, over that sum's length. A collective."""
    expected = exchanged.delivered.dense().double()
    dist.all_reduce(expected)
    return float((total.double() - expected).norm() / expected.norm().clamp_min(1e-30))


def _check_bytes(exchange: Exchange, payload: Payload, sent: float, size: int) -> None:
    """Raise Wrong if the bytes reported are not those of the buffers. Rounds may send anything but nothing."""
    exact: dict[type, Callable[[], float]] = {
        AllGather: lambda: (size - 1) * payload.to_buffer().numel(),
        AllReduce: lambda: ring_bytes(payload.values.nbytes, size),
    }
    count = exact.get(type(exchange))
    if count is not None and sent != count():
        raise Wrong(f"{sent:g} bytes were reported; the buffers sent had {count():g}")
    if size > 1 and not sent > 0:
        raise Wrong(f"{sent:g} bytes were reported; expected more than none")

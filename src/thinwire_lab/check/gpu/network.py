"""How long is a step over NCCL's sockets, on links of a limited rate? Two ranks, each with a GPU and a link of its own.

Without GPUs, two ranks of Gloo try the program.
"""

import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from thinwire_lab.check.gpu import steps
from thinwire_lab.cluster.link import INTERFACE_VARIABLE, parse_rate
from thinwire_lab.cluster.local import Cluster
from thinwire_lab.cluster.rounds import events
from thinwire_lab.cluster.worker import Emit
from thinwire_lab.cluster.workers import join_group

RANKS = 2
LINKS = ("10gbit", "25gbit", "100gbit")
RECIPES = ("bf16", "topk", "dgc", "qsgd", "fading", "orthogonal")
_HANDLER = f"{__name__}:handle"
_SOCKETS_ALONE = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1"}


def timed(link: str, device: str, tokens: int, names: Sequence[str]) -> dict[str, Any]:
    """Return what steps take with these recipes and without one; or why the link could not be limited."""
    with Cluster(RANKS, parse_rate(link), _HANDLER) as cluster:
        if not cluster.throttled:
            return {"left_out": cluster.label}
        rows = events(cluster, device=device, tokens=tokens, names=list(names))
    return {"link": cluster.label} | steps.gathered(rows)


def handle(job: dict[str, Any], emit: Emit) -> None:
    """Time steps in one of the ranks."""
    rank = int(os.environ["RANK"])
    device = torch.device(job["device"], rank) if job["device"] == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        os.environ.update(_SOCKETS_ALONE, NCCL_SOCKET_IFNAME=os.environ[INTERFACE_VARIABLE])
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        join_group()
    shape = steps.SHAPE if device.type == "cuda" else steps.TINY
    for row in steps.timed(job["tokens"], device, tuple(job["names"]), shape):
        if rank == 0 or "error" in row:
            emit(row)

"""Do ranks that train in 16 bits stay alike? Two of Gloo share a GPU; with a loss scaler, some steps overflow."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from thinwire_lab.check import training
from thinwire_lab.check.findings import Wrong, first_line
from thinwire_lab.check.gpu import steps
from thinwire_lab.cluster.local import Cluster
from thinwire_lab.cluster.rounds import events
from thinwire_lab.cluster.worker import Emit

KINDS = ("bfloat16", "float16", "scaled")
"""The dtype of a model; or float32, with autocast to float16 and a GradScaler."""
NAMES = training.NAMES
_RANKS, _STEPS, _HANDLER = 2, 12, f"{__name__}:handle"
_SCALE: dict[str, Any] = {
    "init_scale": 2.0**34,
    "growth_factor": 2.0**6,
    "backoff_factor": 2.0**-6,
    "growth_interval": 3,
}


def compared(kind: str, device: torch.device, names: Sequence[str]) -> dict[str, Any]:
    """Return how recipes went."""
    with Cluster(_RANKS, None, _HANDLER, namespaces=False) as cluster:
        return steps.gathered(events(cluster, kind=kind, device=str(device), names=list(names)))


def handle(job: dict[str, Any], emit: Emit) -> None:
    """Train with each recipe in one of the ranks."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    torch.manual_seed(dist.get_rank())  # of data: DDP has all begin with the same model
    for name in job["names"]:
        row: dict[str, Any] = {"name": name}
        try:
            row["skipped"] = trained(name, job["kind"], torch.device(job["device"]))
        except Exception as error:
            row["error"] = first_line(error)
        if dist.get_rank() == 0 or "error" in row:
            emit(row)


def trained(name: str, kind: str, device: torch.device) -> int:
    """Train with a recipe, and return how many steps were skipped. Raises Wrong."""
    scaled = kind == "scaled"
    dtype = torch.float32 if scaled else getattr(torch, kind)
    model = nn.Sequential(nn.Linear(48, 96), nn.Tanh(), nn.Linear(96, 8)).to(device, dtype)
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler(device.type, enabled=scaled, **_SCALE)
    handle = tw.attach(wrapped, training.recipe(name), optimizer=optimizer, scaler=scaler if scaled else None)
    rounded = torch.autocast(device.type, torch.float16) if scaled else nullcontext()
    skipped = sum(_falls(scaler, lambda: _step(wrapped, optimizer, scaler, dtype, rounded)) for _ in range(_STEPS))
    if drifted := handle.differing_parameters():
        raise Wrong(f"replicas differ after {_STEPS} steps: {drifted[0]}")
    if not all(bool(p.isfinite().all()) for p in model.parameters()):
        raise Wrong(f"parameters are not finite after {_STEPS} steps")
    if scaled and not 0 < skipped < _STEPS:
        raise Wrong(f"{skipped} of {_STEPS} steps overflowed; expected some, and not all")
    return skipped


def _step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    dtype: torch.dtype,
    rounded: AbstractContextManager[Any],
) -> None:
    optimizer.zero_grad()
    x = torch.randn(8, 48).to(next(model.parameters()).device, dtype)
    with rounded:
        loss = (model(x) - x[:, :8]).float().square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()


def _falls(scaler: torch.amp.GradScaler, step: Callable[[], None]) -> bool:
    before = scaler.get_scale()
    step()
    return scaler.get_scale() < before

"""Does memory grow from step to step? What tensors take, and what the allocator keeps for them, stream by stream."""

import gc
from collections import Counter
from typing import Any

import torch
from torch import Tensor

from thinwire_lab.check.findings import Wrong
from thinwire_lab.check.gpu.buckets import Case, Work
from thinwire_lab.check.gpu.counting import synchronize

_STEPS, _SETTLED = 50, 20  # steps, after so many of which nothing new is captured or compiled


def measured(case: Case, device: torch.device, steps: int = _STEPS, settled: int = _SETTLED) -> dict[str, Any]:
    """Return what a bucket's steps hold, in bytes. Raises Wrong if it grows once they have settled."""
    work, each = Work(case, device), list[dict[str, int]]()
    for _ in range(steps):
        work.prepare()
        work.step()
        synchronize(device)  # or what streams still use would count
        each.append(_held(device))
    middle = (settled + steps) // 2
    for kind in each[0]:
        before, after = (max(found[kind] for found in some) for some in (each[settled:middle], each[middle:]))
        if after > before:
            raise Wrong(f"{kind} grow from {before} in steps {settled} to {middle - 1} to {after} in later ones")
    return {kind: [found[kind] for found in each] for kind in each[0]} | {"streams": _by_stream(device)}


def _held(device: torch.device) -> dict[str, int]:
    if device.type == "cuda":
        found = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
        return dict(zip(("allocated_bytes", "reserved_bytes"), found, strict=True))
    gc.collect()
    storages = [x.untyped_storage() for x in gc.get_objects() if issubclass(type(x), Tensor)]
    return {"allocated_bytes": sum({each._cdata: each.nbytes() for each in storages}.values())}


def _by_stream(device: torch.device) -> list[int]:
    """Return the bytes that the allocator has reserved for each stream, the most first."""
    found = Counter[int]()
    for segment in torch.cuda.memory_snapshot() if device.type == "cuda" else ():
        found[segment["stream"]] += segment["total_size"]
    return [nbytes for _, nbytes in found.most_common()]

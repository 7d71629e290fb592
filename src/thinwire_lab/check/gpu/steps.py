"""How much longer is a training step? A GPT in DDP over NCCL with one rank, with a recipe and without.

With one rank nothing travels, so what a step takes longer is what a recipe costs on a network without limit.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore  # torch.distributed has it, its stubs do not
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from thinwire.planner.candidates import PLANNED
from thinwire.planner.probe import measure
from thinwire.recipes import METHODS
from thinwire_lab.check.findings import first_line
from thinwire_lab.problems.transformer import ByteGPT, Shape

PLAIN, HOOK = "plain DDP", "PyTorch's bf16 hook"
RECIPES = ("bf16", "topk", "sampled_topk", "dgc", "dragonn", "fading", "qsgd", "signsgd", "orthogonal")
TOKENS = (4096, 16384, 65536)
SHAPE = Shape(context=512, width=896, heads=14, layers=13)
TINY, FEW = Shape(context=16, width=32, heads=2, layers=1), 64
"""A shape, and tokens, that try the program without a GPU."""
_ADAPTIVE = {"fading", "orthogonal"}  # recipes for AdamW; the others are timed under SGD
_WARM_UP, _STEPS = 14, 12  # by then a bucket's kernels are captured


def timed(tokens: int, device: torch.device, names: tuple[str, ...], shape: Shape = SHAPE) -> Iterator[dict[str, Any]]:
    """Time a step with each of these names, after plain DDP under the same optimizer."""
    for adaptive in (False, True):
        chosen = [name for name in names if (name in _ADAPTIVE) == adaptive]
        hook = [HOOK] if not adaptive and device.type == "cuda" else []
        for name in (PLAIN, *hook, *chosen) if chosen else ():
            found: dict[str, Any] = {"name": name, "optimizer": "AdamW" if adaptive else "SGD", "tokens": tokens}
            try:
                found["ms"] = _ms(name, tokens, device, shape, adaptive=adaptive)
            except Exception as error:
                found["error"] = first_line(error)
            yield found


def gathered(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what `timed` yielded, and the errors in it as one."""
    found = list(rows)
    return with_errors(found, [f"{row['name']}: {row['error']}" for row in found if "error" in row])


def with_errors(rows: Sequence[Mapping[str, Any]], wrong: Sequence[str]) -> dict[str, Any]:
    """Return a part's row of so many rows, with what is `wrong` with any of them."""
    return {"rows": rows} | ({"error": "; ".join(wrong)} if wrong else {})


def note_overlap(rows: Sequence[dict[str, Any]], buckets: Mapping[str, Mapping[str, Any]]) -> None:
    """Note how long a step's recipe keeps the GPU busy, and which share of that backward hides.

    Args:
        rows: What `timed` yielded. They get `busy_ms` and `hidden`.
        buckets: What one bucket takes, by recipe.
    """
    with torch.device("meta"):
        numel = sum(p.numel() for p in ByteGPT(SHAPE).parameters())
    plain = {row["optimizer"]: row["ms"] for row in rows if row["name"] == PLAIN and "ms" in row}
    for row in rows:
        bucket = buckets.get(row["name"])
        if bucket is not None and "ms" in row and row["optimizer"] in plain:
            row["busy_ms"] = sum(bucket["busy_ms"].values()) * numel / bucket["elements"]
            row["hidden"] = min(1.0, max(0.0, 1 - (row["ms"] - plain[row["optimizer"]]) / row["busy_ms"]))


def _ms(name: str, tokens: int, device: torch.device, shape: Shape, *, adaptive: bool) -> float:
    torch.manual_seed(0)
    model = DistributedDataParallel(ByteGPT(shape).to(device), gradient_as_bucket_view=True)
    optimizer: torch.optim.Optimizer
    if adaptive:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=device.type == "cuda")
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, foreach=True)
    if name == HOOK:
        model.register_comm_hook(dist.group.WORLD, bf16_compress_hook)
    elif name != PLAIN:
        tw.attach(model, {**METHODS, **PLANNED}[name].make(), optimizer=optimizer)
    x = torch.randint(0, 256, (tokens // shape.context, shape.context + 1), device=device)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, torch.bfloat16):
            logits = model(x[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), x[:, 1:].flatten())
        loss.backward()
        optimizer.step()

    return median(_each(step, device))


def _each(step: Callable[[], None], device: torch.device) -> list[float]:
    """Return the milliseconds of each of some steps, as they follow one another."""
    for _ in range(_WARM_UP):
        step()
    if device.type != "cuda":
        return [1e3 * measure.timed(step, device) for _ in range(_STEPS)]
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(_STEPS + 1)]
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
    torch.cuda.synchronize(device)
    return [begin.elapsed_time(end) for begin, end in pairwise(marks)]


@contextlib.contextmanager
def one_rank(device: torch.device) -> Iterator[None]:
    """Have a group of NCCL with one rank, or of Gloo on a CPU, in place of what group there was."""
    if dist.is_initialized():
        dist.destroy_process_group()
    backend, own = ("nccl", device) if device.type == "cuda" else ("gloo", None)
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, device_id=own)
    try:
        yield
    finally:
        dist.destroy_process_group()

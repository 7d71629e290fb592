"""Does the host wait where a bucket's layout is new, or its density changes? Then tables are new, too."""

from contextlib import ExitStack
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from thinwire.recipes import topk
from thinwire.schedules import FollowLearningRate
from thinwire_lab.check.findings import Wrong
from thinwire_lab.check.gpu.buckets import Case, Work
from thinwire_lab.check.gpu.counting import counting, forget, gpu_path
from thinwire_lab.check.waits import counted

_DENSITY = FollowLearningRate(learning_rate=lambda step: 1 / (1 + step), smoothness=1.0)
_STEPS = 3


def checked(device: torch.device, layouts: int) -> dict[str, Any]:
    """Reduce buckets of so many layouts; without a GPU, of tensors without elements, which raise if they are read."""
    with ExitStack() as stack:
        if device.type != "cuda":
            stack.callback(forget)
            for each in (gpu_path(), FakeTensorMode(allow_non_fake_inputs=True), counting()):
                stack.enter_context(each)
        _reduce(device, 0)  # compiles
        with counted(device) as waits:
            for number in range(1, layouts + 1):
                _reduce(device, number)
    if waits.count:
        where = ", ".join(waits.places) or "where Python cannot tell"
        raise Wrong(f"the host waits {waits.count} times for {layouts} layouts; expected never: at {where}")
    return {"layouts": layouts, "steps": _STEPS * layouts}


def _reduce(device: torch.device, number: int) -> None:
    shapes = (2000 + number, 32), (1 + number,), (64, 70)
    work = Work(Case(recipe="dense", tensors=len(shapes), dtype="float32", numel=0, shapes=shapes), device)
    work.recipe = topk(density=_DENSITY)
    for _ in range(_STEPS):
        work.prepare()
        work.step()

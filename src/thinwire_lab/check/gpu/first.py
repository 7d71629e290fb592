"""What do a recipe's first steps take? Kernels are compiled then, so each recipe gets a process that knows none yet."""

import os
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import torch

from thinwire_lab.check.gpu.buckets import Case, Work
from thinwire_lab.check.gpu.counting import gpu_path, synchronize
from thinwire_lab.cluster.local import Cluster
from thinwire_lab.cluster.rounds import events
from thinwire_lab.cluster.worker import Emit

RECIPES = ("topk", "dgc", "dragonn", "fading", "qsgd")
_HANDLER = f"{__name__}:handle"
_STEPS = 8  # by then the first set of buffers is captured
_SAMPLE = 4096  # elements that `attach` compiles for


def measured(case: Case, device: torch.device, steps: int = _STEPS) -> dict[str, Any]:
    """Return the seconds of preparing a recipe, and of each of a bucket's first steps."""
    alone = Cluster(1, None, _HANDLER, namespaces=False)
    with TemporaryDirectory() as cache, mock.patch.dict(os.environ, TRITON_CACHE_DIR=cache), alone:
        (found,) = events(alone, case=asdict(case), device=str(device), steps=steps)
    return dict(found)


def handle(job: dict[str, Any], emit: Emit) -> None:
    """Measure in the process itself."""
    device, case = torch.device(job["device"]), Case(**job["case"])
    with gpu_path() if device.type == "cpu" else nullcontext():
        prepared, *each = _seconds(case, device, job["steps"])
    emit({"recipe": case.recipe, "prepare_s": prepared, "steps_s": each})


def _seconds(case: Case, device: torch.device, steps: int) -> Iterator[float]:
    work = Work(case, device)
    for number in range(-1, steps):
        work.prepare()
        synchronize(device)
        start = time.perf_counter()
        if number < 0:
            work.recipe.prepare(work.group, [work.flat[:_SAMPLE]])
        else:
            work.step()
        synchronize(device)
        yield time.perf_counter() - start

"""One row on one worker: train the problem with one method."""

import copy
import gc
import inspect
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.bench.methods import METHODS, Method
from thinwire.bench.problems import Problem
from thinwire.bench.timing import timed_step
from thinwire.integrations import replicas
from thinwire.schedules import Schedule, exponential_warmup

Emit = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, kw_only=True)
class RowJob:
    """What to train. `most_steps` bounds the search for `target` after `steps`; evaluate every `every` steps.

    Figures are taken from step `skip` on.
    """

    recipe: str
    density: float
    steps: int
    most_steps: int
    every: int
    skip: int = 0
    target: float | None = None
    warmup: int = 0

    @property
    def scheduled_density(self) -> float | Schedule:
        """The density, over `warmup` steps falling from 1/4 where the method warms up."""
        stages = 4
        if not METHODS[self.recipe].warms_up or self.warmup < stages:
            return self.density
        return exponential_warmup(self.density, steps_each=self.warmup // stages, stages=stages)


Wire = Callable[[], tuple[int, int] | None]
"""Bytes and packets sent so far on this worker's interface, or None where they cannot be told."""


_QUIET, _LONGEST_DRAIN = 0.02, 100  # seconds, readings


@dataclass
class Meter:
    """What this worker has put on the wire: bytes as counted, or as declared where the wire cannot be read."""

    wire: Wire
    total: float = 0.0
    _last: tuple[int, int] | None = None

    def skip(self) -> None:
        """Leave out what has travelled since the last reading."""
        self._last = self._at_rest()

    def read(self, declared: float) -> dict[str, int]:
        """Add what has travelled since the last reading, and return its bytes and packets if they were counted."""
        last, self._last = self._last, self.wire()
        if last is None or self._last is None:
            self.total += declared
            return {}
        nbytes, packets = self._last[0] - last[0], self._last[1] - last[1]
        self.total += nbytes
        return {"measured": nbytes, "packets": packets}

    def drain(self) -> dict[str, int]:
        """Wait until nothing more leaves, and return what has left since the last reading: the end of a step's bytes.

        A collective is over for a rank that has all it needs, while what it sent may still queue.
        """
        self._at_rest()
        return self.read(0.0)

    def _at_rest(self) -> tuple[int, int] | None:
        before, now = None, self.wire()
        for _ in range(_LONGEST_DRAIN):
            if now == before:
                break
            time.sleep(_QUIET)
            before, now = now, self.wire()
        return now


@dataclass(kw_only=True)
class Run:
    """A model in training."""

    problem: Problem
    model: DistributedDataParallel
    optimizer: torch.optim.Optimizer
    meter: Meter
    seconds: float = 0.0


def train(job: RowJob, problem: Problem, wire: Wire, emit: Emit) -> None:
    """Train one row and emit its events.

    "step", "tail" (bytes of the step before that were still on their way), "loss", and at last "done" with the
    parameters that differ by rank.
    """
    gc.collect()  # an earlier row's model is a cycle, and may be large
    run = _prepare(METHODS[job.recipe], job.scheduled_density, problem, Meter(wire))
    for step in range(job.most_steps + 1):
        evaluate = step % job.every == 0 or step == job.steps
        if evaluate or step == job.skip:
            emit({"kind": "tail", **run.meter.drain()})
        if evaluate:
            loss = _held_out_loss(run)
            emit({"kind": "loss", "step": step, "seconds": run.seconds, "bytes": run.meter.total, "loss": loss})
            if step >= job.steps and _is_over(loss, job.target):
                break
        if step < job.most_steps:
            emit({"kind": "step", "step": step, **_step(run, step)})
    parameters = dict(run.model.module.named_parameters())
    emit({"kind": "done", "different": replicas.differing(parameters, run.model.process_group)})


def _is_over(loss: float, target: float | None) -> bool:
    return target is None or loss <= target or not math.isfinite(loss)


def _prepare(method: Method, density: float | Schedule, problem: Problem, meter: Meter) -> Run:
    model = wrapped(copy.deepcopy(problem.model), bucket_cap_mb=1 << 20 if method.one_bucket else None)
    optimizer = sgd(model.module, problem)
    method.install(model, optimizer, density)
    return Run(problem=problem, model=model, optimizer=optimizer, meter=meter)


def wrapped(module: nn.Module, *, bucket_cap_mb: float | None = None) -> DistributedDataParallel:
    """Wrap a module the way the bench trains it."""
    return DistributedDataParallel(
        module, gradient_as_bucket_view=True, bucket_cap_mb=bucket_cap_mb, **_without_buffer_sync()
    )


def sgd(model: nn.Module, problem: Problem) -> torch.optim.SGD:
    """SGD with momentum, but none for embeddings with sparse gradients: theirs would grow denser by the step."""
    embeddings = (module for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag))
    sparse = {module.weight for module in embeddings if module.sparse}
    groups: list[dict[str, Any]] = [
        {"params": [p for p in model.parameters() if p not in sparse]},
        {"params": [p for p in model.parameters() if p in sparse], "momentum": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.SGD(groups, lr=problem.learning_rate, momentum=problem.momentum)


def _step(run: Run, step: int) -> dict[str, float]:
    """Take one step; the batch is ready before the clock starts."""
    batch = run.problem.batch(step, dist.get_rank(), dist.get_world_size())
    run.optimizer.zero_grad(set_to_none=True)
    run.model.train()
    times = timed_step(lambda: run.problem.loss(run.model, batch), run.optimizer.step)
    run.seconds += times.total
    return asdict(times) | {"total": times.total} | run.meter.read(times.sent_bytes)


@torch.no_grad()
def _held_out_loss(run: Run) -> float:
    """Return the mean loss over every rank's share. Its few bytes are not counted."""
    module: nn.Module = run.model.module
    module.eval()
    shares = run.problem.held_out(dist.get_rank(), dist.get_world_size())
    mean = torch.stack([run.problem.loss(module, batch) for batch in shares]).mean()
    dist.all_reduce(mean)
    run.meter.skip()
    return float(mean) / dist.get_world_size()


def _without_buffer_sync() -> dict[str, Any]:
    """Name the option by which DDP leaves BatchNorm's buffers alone: it changed after torch 2.12."""
    options = inspect.signature(DistributedDataParallel).parameters
    return {"forward_sync_buffers" if "forward_sync_buffers" in options else "broadcast_buffers": False}

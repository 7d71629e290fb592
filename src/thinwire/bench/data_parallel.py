"""A row in data parallelism: every worker has the whole model."""

import copy
import inspect
from dataclasses import asdict
from typing import Any, final

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.bench.meter import Meter
from thinwire.bench.methods import METHODS
from thinwire.bench.problems import Problem
from thinwire.bench.timing import timed_step
from thinwire.bench.training import RowJob
from thinwire.exchanges.compat import Group
from thinwire.integrations.drift import differing
from thinwire.integrations.managed import sparse_weights


@final
class DataParallel:
    """See `training.Run`."""

    def __init__(self, job: RowJob, problem: Problem, meter: Meter) -> None:
        method = METHODS[job.recipe]
        self.meter, self.seconds = meter, 0.0
        self._problem = problem
        cap = 1 << 20 if method.one_bucket else None
        self._model = wrapped(copy.deepcopy(problem.model), bucket_cap_mb=cap)
        self._optimizer = sgd(self._model.module, problem)
        method.install(self._model, self._optimizer, job.scheduled_density)

    def step(self, step: int) -> dict[str, float]:
        """Take one step; the batch is ready before the clock starts."""
        batch = self._problem.batch(step, dist.get_rank(), dist.get_world_size())
        self._optimizer.zero_grad(set_to_none=True)
        self._model.train()
        times = timed_step(lambda: self._problem.loss(self._model, batch), self._optimizer.step)
        self.seconds += times.total
        dense = dense_bytes(self._model.module, dist.get_world_size())
        return asdict(times) | {"total": times.total, "dense_bytes": dense} | self.meter.read(times.sent_bytes)

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """Return the mean loss over every rank's share."""
        module: nn.Module = self._model.module
        module.eval()
        shares = self._problem.held_out(dist.get_rank(), dist.get_world_size())
        mean = torch.stack([self._problem.loss(module, batch) for batch in shares]).mean()
        dist.all_reduce(mean)
        self.meter.skip()
        return float(mean) / dist.get_world_size()

    def differing(self) -> list[str]:
        """Compare the replicas."""
        return differing(dict(self._model.module.named_parameters()), self._model.process_group)


def wrapped(
    module: nn.Module, *, bucket_cap_mb: float | None = None, group: Group | None = None
) -> DistributedDataParallel:
    """Wrap a module the way the bench trains it."""
    return DistributedDataParallel(
        module,
        gradient_as_bucket_view=True,
        bucket_cap_mb=bucket_cap_mb,
        process_group=group,
        **_without_buffer_sync(),
    )


def sgd(model: nn.Module, problem: Problem) -> torch.optim.SGD:
    """SGD with momentum, but none for embeddings with sparse gradients: theirs would grow denser by the step."""
    sparse = sparse_weights(model)
    groups: list[dict[str, Any]] = [
        {"params": [p for p in model.parameters() if p not in sparse]},
        {"params": [p for p in model.parameters() if p in sparse], "momentum": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.SGD(groups, lr=problem.learning_rate, momentum=problem.momentum)


def dense_bytes(model: nn.Module, world: int) -> float:
    """Return what a ring all-reduce of float32 gradients makes one of `world` ranks send."""
    return 2 * (world - 1) / world * 4.0 * sum(p.numel() for p in model.parameters())


def _without_buffer_sync() -> dict[str, Any]:
    """Name the option by which DDP leaves BatchNorm's buffers alone: it changed after torch 2.12."""
    options = inspect.signature(DistributedDataParallel).parameters
    return {"forward_sync_buffers" if "forward_sync_buffers" in options else "broadcast_buffers": False}

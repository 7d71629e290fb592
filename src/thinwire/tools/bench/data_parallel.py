"""A row in data parallelism: every worker has the whole model."""

import copy
from dataclasses import asdict
from typing import final

import torch
import torch.distributed as dist
from torch import nn

from thinwire.integrations import replicas
from thinwire.tools.bench.methods import METHODS
from thinwire.tools.bench.timing import timed_step
from thinwire.tools.bench.training import RowJob
from thinwire.tools.cluster.meter import Meter
from thinwire.tools.cluster.workers import wrapped
from thinwire.tools.problems import Problem
from thinwire.tools.problems.base import sgd


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
        return replicas.differing(dict(self._model.module.named_parameters()), self._model.process_group)


def dense_bytes(model: nn.Module, world: int) -> float:
    """Return what a ring all-reduce of float32 gradients makes one of `world` ranks send."""
    return 2 * (world - 1) / world * 4.0 * sum(p.numel() for p in model.parameters())

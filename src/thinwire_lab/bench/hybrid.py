"""A row in hybrid parallelism: each worker has one stage of a split model; replicas of a stage exchange gradients."""

import copy
import functools
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from thinwire import trace
from thinwire.collectives import Group, all_gather_plain
from thinwire.integrations.training.drift import differing
from thinwire.pipeline import sparsify
from thinwire_lab.bench.data_parallel import OfThread, dense_bytes, mean_held_out
from thinwire_lab.bench.methods import BENCHED
from thinwire_lab.bench.options import RowJob
from thinwire_lab.cluster.link import Meter
from thinwire_lab.cluster.workers import mesh, wrapped
from thinwire_lab.problems import Problem
from thinwire_lab.problems.base import parts_of
from thinwire_lab.problems.optimizers import optimizers, step_all, zero_all

_CPU = torch.device("cpu")


@final
class Hybrid:
    """See `worker.Run`. Stages × replicas, in the order of ranks: the stages of a replica are neighbours."""

    def __init__(self, job: RowJob, problem: Problem, meter: Meter) -> None:
        method, self._mesh = BENCHED[job.recipe], mesh(job.stages)
        self.meter, self.seconds = meter, 0.0
        self._problem, self._parts = problem, parts_of(problem)
        self._index, stages = self._mesh.get_local_rank("stage"), job.stages
        own = self._parts.split(copy.deepcopy(problem.model), stages)[self._index]
        self._own, self._first, self._last = own, self._index == 0, self._index == stages - 1
        counted = ("dense_bytes",) if job.boundary < 1 else ("dense_bytes", "sent_bytes")
        own.register_forward_hook(functools.partial(self._count, counted))
        group = self._mesh.get_group("replica")
        self._model = wrapped(own, bucket_cap_mb=1 << 20 if method.one_bucket else None, group=group)
        self._optimizers = optimizers(job.optimizer, own, problem)
        self.handle = method.install(self._model, self._optimizers, job.scheduled_density)
        stage = PipelineStage(self._model, self._index, stages, _CPU, group=self._mesh.get_group("stage"))
        self._whole = self._parts.split(copy.deepcopy(problem.model), stages)
        if job.boundary < 1:
            for one in ([stage], self._whole):
                sparsify(one, job.boundary, values=torch.bfloat16)
        self._schedule = Schedule1F1B(stage, job.micro_batches, loss_fn=self._parts.criterion)

    def step(self, step: int) -> dict[str, float]:
        """Take one step; the batch is ready before the clock starts.

        Whenever this worker did not compute, it waited: for the link, a neighbour or the processor.
        """
        rank, replicas_ = self._mesh.get_local_rank("replica"), self._mesh["replica"].size()
        args, kwargs, target = self._parts.feed(self._problem.batch(step, rank, replicas_))
        fed: dict[str, Any] = {**kwargs, "target": target if self._last else None}
        zero_all(self._optimizers)
        self._model.train()
        recorder = OfThread()
        with trace.listen(recorder):
            start, busy = time.perf_counter(), time.thread_time()
            self._schedule.step(*(args if self._first else ()), **fed)
            step_all(self._optimizers)
            total, busy = time.perf_counter() - start, time.thread_time() - busy
        self.seconds += total
        sent = recorder.totals.get("sent_bytes", 0.0)
        dense = recorder.totals.get("dense_bytes", 0.0) + dense_bytes(self._own, replicas_)
        return recorder.split(total, busy) | {"sent_bytes": sent, "dense_bytes": dense} | self.meter.read(sent)

    def held_out_loss(self) -> float:
        """Return the mean loss over all ranks' shares; every rank first collects the weights of all stages."""
        collect(self._whole, self._own, self._index, self._mesh.get_group("stage"))
        staged = replace(self._problem, loss=lambda _, batch: self._parts.loss(self._whole, batch))
        return mean_held_out(staged, nn.ModuleList(self._whole), self.meter)

    def differing(self) -> list[str]:
        """Compare the replicas of every stage, and return what differs alike on all ranks."""
        found = differing(dict(self._own.named_parameters()), self._mesh.get_group("replica"))
        return sorted(set().union(*all_gather_plain(found, self._mesh.get_group("stage"))))

    def _count(self, names: tuple[str, ...], module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        """Count what this worker would send uncompressed per micro-batch: activations forward, gradients back."""
        nbytes = (0 if self._last else output.nbytes) + (0 if self._first else args[0].nbytes)
        for name in names:
            trace.count(name, nbytes)


def collect(whole: Sequence[nn.Module], own: nn.Module, index: int, group: Group) -> None:
    """Collect the weights of all stages of a pipeline into `whole`; `own` is this worker's, the `index`-th."""
    for at, part in enumerate(whole):
        for into, mine in zip(_state(part), _state(own if at == index else part), strict=True):
            into.copy_(mine)
            dist.broadcast(into, group=group, group_src=at)


def _state(module: nn.Module) -> list[Tensor]:
    return [tensor.detach() for tensor in (*module.parameters(), *module.buffers())]

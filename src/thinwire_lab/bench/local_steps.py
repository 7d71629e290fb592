"""A row in outer steps: every worker trains on its own, and every so many steps they exchange how far they moved."""

import copy
import time
from typing import final

import torch.distributed as dist
from torch import nn

from thinwire import trace
from thinwire.integrations import outer
from thinwire_lab.bench.data_parallel import dense_bytes, mean_held_out
from thinwire_lab.bench.methods import ENTRANTS
from thinwire_lab.bench.options import RowJob
from thinwire_lab.cluster.link import Meter
from thinwire_lab.problems import Problem
from thinwire_lab.problems.optimizers import optimizers, step_all, zero_all


@final
class LocalSteps:
    """See `worker.Run`. Losses are those of the global parameters, which change at outer steps alone."""

    def __init__(self, job: RowJob, problem: Problem, meter: Meter) -> None:
        self.meter, self.seconds = meter, 0.0
        self._problem = problem
        self._model, self._shown = copy.deepcopy(problem.model), copy.deepcopy(problem.model)
        self._optimizers = optimizers(job.optimizer, self._model, problem)
        make = ENTRANTS[job.recipe].outer_steps
        assert make is not None  # options have seen to that
        self._handle = outer(self._model, self._optimizers, make(job.density, job.outer))

    def step(self, step: int) -> dict[str, float]:
        """Take one inner step; the batch is ready before the clock starts."""
        batch = self._problem.batch(step, dist.get_rank(), dist.get_world_size())
        zero_all(self._optimizers)
        self._model.train()
        waited = self._handle.waited
        with trace.listen(trace.Recorder()) as recorder:
            start = time.perf_counter()
            self._problem.loss(self._model, batch).backward()
            step_all(self._optimizers)
            total = time.perf_counter() - start
        self.seconds += total
        sent = recorder.totals.get("sent_bytes", 0.0)
        dense = dense_bytes(self._model, dist.get_world_size())
        waited = self._handle.waited - waited
        split = _split(recorder, total, waited)
        return split | {"waited": waited, "sent_bytes": sent, "dense_bytes": dense} | self.meter.read(sent)

    def held_out_loss(self) -> float:
        """Return the mean loss of the global parameters over every rank's share."""
        shown: nn.Module = self._shown
        shown.load_state_dict(self._model.state_dict())
        shown.load_state_dict(self._handle.parameters, strict=False)  # tied weights have one name here
        return mean_held_out(self._problem, shown, self.meter)

    def differing(self) -> list[str]:
        """Compare the global parameters."""
        return self._handle.differing_parameters()


def _split(recorder: trace.Recorder, total: float, waited: float) -> dict[str, float]:
    """Return the parts of a step. What is decoded while this worker waits does not count as exchange."""
    encode, decode = recorder.seconds("encode"), recorder.seconds("decode")
    exchange = max(0.0, waited - decode)
    compute = max(0.0, total - encode - exchange - decode)
    return {"compute": compute, "encode": encode, "exchange": exchange, "decode": decode, "total": total}

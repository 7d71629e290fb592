"""A row in outer steps: every worker trains on its own, and every so many steps they exchange how far they moved."""

import copy
import json
import time
from collections import Counter
from collections.abc import Mapping
from itertools import count
from typing import Any, final

import torch.distributed as dist
from torch import nn

from thinwire import trace
from thinwire.integrations import outer
from thinwire_lab.bench.data_parallel import Slowness, dense_bytes, mean_held_out, parts
from thinwire_lab.bench.methods import BENCHED
from thinwire_lab.bench.options import RowJob
from thinwire_lab.bench.served import Bell
from thinwire_lab.cluster.link import Meter
from thinwire_lab.cluster.workers import host
from thinwire_lab.problems import Problem
from thinwire_lab.problems.base import held_out_loss
from thinwire_lab.problems.optimizers import optimizers, step_all, zero_all

_GRACE = 5.0


@final
class LocalSteps:
    """See `worker.Run`. Losses are those of the global parameters, which change at outer steps alone.

    If one worker is slow or vanishes, they find each other by a store, and go on asynchronously; the first one leads.
    `waited_for` then has the seconds that each rank has waited for each, but while the first one evaluates.
    """

    def __init__(self, job: RowJob, problem: Problem, meter: Meter) -> None:
        self.meter, self.seconds = meter, 0.0
        self._problem = problem
        self._model, self._shown = copy.deepcopy(problem.model), copy.deepcopy(problem.model)
        self._optimizers = optimizers(job.optimizer, self._model, problem)
        make = BENCHED[job.recipe].outer_steps
        assert make is not None  # options have seen to that
        self._slowness, self._bell, options = Slowness(job.slowness(dist.get_rank())), None, dict[str, Any]()
        self.waited_for: list[list[float]] | None = None
        self._paused = Counter[str]()  # what was waited for while the first worker evaluates
        if job.uneven:
            self._bell, address = Bell(job.ports[0]), f"tcp://{host(0)}:{job.ports[0]}"
            options = {"store": address, "workers": dist.get_world_size(), "grace": _GRACE}
        self.handle = outer(self._model, self._optimizers, make(job.density, job.outer), **options)

    def step(self, step: int) -> dict[str, float]:
        """Take one inner step; the batch is ready before the clock starts."""
        batch = self._problem.batch(step, dist.get_rank(), dist.get_world_size())
        zero_all(self._optimizers)
        self._model.train()
        waited = self.handle.waited
        with trace.listen(trace.Recorder()) as recorder:
            start = time.perf_counter()
            with self._slowness:
                self._problem.loss(self._model, batch).backward()
            step_all(self._optimizers)
            total = time.perf_counter() - start
        self.seconds += total
        sent = recorder.totals.get("sent_bytes", 0.0)
        dense = dense_bytes(self._model, dist.get_world_size())
        waited = self.handle.waited - waited
        encode, decode = recorder.seconds("encode"), recorder.seconds("decode")
        exchange = max(0.0, waited - decode)  # what is decoded while this worker waits is none
        split = parts(total, encode=encode, exchange=exchange, decode=decode)
        return split | {"waited": waited, "sent_bytes": sent, "dense_bytes": dense} | self.meter.read(sent)

    def held_out_loss(self) -> float:
        """Return the mean loss of the global parameters over every rank's share."""
        shown: nn.Module = self._shown
        shown.load_state_dict(self._model.state_dict())
        shown.load_state_dict(self.handle.parameters, strict=False)  # tied weights have one name here
        if self._bell is None:
            return mean_held_out(self._problem, shown, self.meter)
        with self._bell.paused():
            found = float(held_out_loss(self._problem, shown))
        self.meter.skip()
        return found

    def differing(self) -> list[str]:
        """Compare the global parameters; workers of unequal pace do so themselves, at each outer step."""
        if self._bell is None:
            return self.handle.differing_parameters()
        self._bell.end()
        self._leave(self._bell)
        told = [json.loads(self._bell.store.get(f"waited {rank}")) for rank in range(dist.get_world_size())]
        names = [name for name, _ in told]
        self.waited_for = [[waited.get(name, 0.0) for name in names] for _, waited in told]
        return []

    def follow(self, most_steps: float) -> None:
        """Train at one's own pace until the first worker has had enough; vanish after `most_steps`."""
        assert self._bell is not None  # whoever follows has one
        for step in count():
            if self._bell.has_ended():
                break
            if step < most_steps:
                before = self.handle.waited_for
                self.step(step)
                if self._bell.rings():
                    self._paused.update(self._waits(before))
            elif step == most_steps:
                self._leave(self._bell, goodbye=False)
            else:
                time.sleep(0.01)
        self._leave(self._bell)

    def _leave(self, bell: Bell, *, goodbye: bool = True) -> None:
        """Tell what was waited for, and go."""
        told = json.dumps([self.handle.name, self._waits(self._paused)])
        bell.store.set(f"waited {dist.get_rank()}", told)
        self.handle.remove(goodbye=goodbye)

    def _waits(self, before: Mapping[str, float]) -> dict[str, float]:
        return {name: seconds - before.get(name, 0.0) for name, seconds in self.handle.waited_for.items()}

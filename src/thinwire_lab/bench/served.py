"""A row on parameter servers: the first ranks train asynchronously, and the others serve."""

import copy
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from itertools import count
from typing import Any, final

import torch.distributed as dist

import thinwire
from thinwire import recipes, trace
from thinwire.codecs import Codec, TopK
from thinwire.reducer import Reducer
from thinwire_lab.bench.data_parallel import Slowness, dense_bytes, parts
from thinwire_lab.bench.options import RowJob
from thinwire_lab.cluster.link import Meter
from thinwire_lab.cluster.workers import host
from thinwire_lab.problems import Problem
from thinwire_lab.problems.base import held_out_loss
from thinwire_lab.problems.optimizers import served_optimizers

_TIMEOUT = 60.0
_MOST = 0.5
"""From this share on, parameters are sent in full."""
_PAUSE, _GO_ON, _END = "pause", "go on", "end"


@final
class Served:
    """See `worker.Run`. A trainer; losses are of the parameters that the first one has."""

    def __init__(self, job: RowJob, problem: Problem, meter: Meter) -> None:
        self.meter, self.seconds, self.handle = meter, 0.0, None
        self._problem, self._world = problem, job.trainers
        self._rank, self._slowness = int(os.environ["RANK"]), Slowness(job.slowness(int(os.environ["RANK"])))
        self._model = copy.deepcopy(problem.model)
        self._bell = Bell(job.ports[0])
        address: dict[str, Any] = {"address": _addresses(job), "reconnect": _TIMEOUT}
        self._trainer = thinwire.connect(self._model, _recipe(job), **address, **_shared(job))

    def step(self, step: int) -> dict[str, float]:
        """Take one step; the batch is ready before the clock starts."""
        batch = self._problem.batch(step, self._rank, self._world)
        self._model.zero_grad()
        self._model.train()
        sent = self._trainer.traffic().sent_bytes
        with trace.listen(trace.Recorder()) as recorder:
            start = time.perf_counter()
            with self._slowness:
                self._problem.loss(self._model, batch).backward()
            computed = time.perf_counter()
            self._trainer.step()
            end = time.perf_counter()
        encode = recorder.seconds("encode")
        sent = self._trainer.traffic().sent_bytes - sent
        self.seconds += end - start
        dense = {"sent_bytes": sent, "dense_bytes": dense_bytes(self._model, self._world)}
        return parts(end - start, encode=encode, exchange=end - computed - encode) | dense | self.meter.read(sent)

    def held_out_loss(self) -> float:
        """Return the mean loss over the held-out set, while the others wait."""
        with self._bell.paused():
            mean = held_out_loss(self._problem, self._model)
            self.meter.skip()
        return float(mean)

    def differing(self) -> list[str]:
        """Let everybody go. Trainers have the servers' parameters, of different versions, so there is no comparison."""
        self._bell.end()
        self._trainer.close()
        return []

    def follow(self, most_steps: float) -> None:
        """Train at one's own pace until the first trainer has had enough; leave after `most_steps`, as if killed."""
        for step in count():
            if self._bell.has_ended():
                self._trainer.close()
                return
            if step == most_steps:
                self._trainer.close(goodbye=False)
            if step < most_steps:
                self.step(step)
            else:
                time.sleep(0.01)


@final
class Bell:
    """How the first trainer tells the others to pause, to go on and to end, through a store that it keeps."""

    def __init__(self, port: int) -> None:
        self.store, self._heard = _store(port), 0

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Have the others pause."""
        self._ring(_PAUSE)
        yield
        self._ring(_GO_ON)

    def end(self) -> None:
        """Tell the others that it is over."""
        self._ring(_END)

    def _ring(self, word: str) -> None:
        self.store.set(str(self._heard), word)
        self._heard += 1

    def rings(self) -> bool:
        """Whether there is a word that this worker has not heard yet."""
        return bool(self.store.check([str(self._heard)]))

    def has_ended(self) -> bool:
        """Whether it is over. Waits through a pause."""
        while self.rings():
            word = self.store.get(str(self._heard)).decode()
            self._heard += 1
            if word == _END:
                return True
            if word == _PAUSE:
                self.store.wait([str(self._heard)])
        return False


@cache  # whoever comes late still asks it
def _store(port: int) -> dist.distributed_c10d.Store:
    first = os.environ["RANK"] == "0"
    if not first:
        dist.barrier()  # whoever asks too early asks again after long pauses
    made: dist.distributed_c10d.Store = dist.TCPStore(  # type: ignore[attr-defined]  # torch does not export it
        host(0), port, None, first, timedelta(hours=1), wait_for_workers=False
    )
    if first:
        dist.barrier()
    return made


def serve(job: RowJob, problem: Problem) -> None:
    """Be one of the servers, until all trainers have left."""
    index, model = int(os.environ["RANK"]) - job.trainers, copy.deepcopy(problem.model)
    optimizer, of_rows = served_optimizers(job.optimizer, problem, job.trainers)
    own = {"address": _addresses(job)[index], "index": index, "trainers": job.trainers, "damped": True}
    told: dict[str, Any] = own | _shared(job)
    with thinwire.serve(model, _recipe(job), make_optimizer=optimizer, make_rows_optimizer=of_rows, **told) as server:
        server.wait()


def _shared(job: RowJob) -> dict[str, Any]:
    """Return what servers and trainers are told alike."""
    return {"servers": job.servers, "down": _down(job), "timeout": _TIMEOUT}


def _addresses(job: RowJob) -> list[str]:
    return [f"{host(job.trainers + i)}:{job.ports[1 + i]}" for i in range(job.servers)]


def _recipe(job: RowJob) -> Reducer:
    return recipes.METHODS[job.recipe].make(job.scheduled_density)


def _down(job: RowJob) -> Codec | None:
    """Return how parameters are sent: as many elements as all trainers together send for each of one's updates."""
    share = job.trainers * job.density
    return None if share >= _MOST else TopK(density=share)

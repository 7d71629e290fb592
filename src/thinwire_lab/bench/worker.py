"""A worker process and its jobs: join the group, build the problem, and train a row."""

import functools
import gc
import math
import os
from collections.abc import Callable
from typing import Any

from thinwire_lab import problems
from thinwire_lab.bench.data_parallel import DataParallel
from thinwire_lab.bench.hybrid import Hybrid
from thinwire_lab.bench.local_steps import LocalSteps
from thinwire_lab.bench.options import RowJob
from thinwire_lab.bench.served import Served, serve
from thinwire_lab.bench.sharded import Sharded
from thinwire_lab.cluster.link import Meter
from thinwire_lab.cluster.worker import Emit
from thinwire_lab.cluster.workers import join_group

Run = DataParallel | Hybrid | LocalSteps | Served | Sharded
"""A model in training on this worker.

`step` takes a step, and returns where its time and bytes went; `held_out_loss`, whose bytes do not count, and
`differing`, which names the parameters that differ between replicas, are collectives. `handle`: what the row's method
returned, if it is thinwire's.
"""


def handle(job: dict[str, Any], emit: Emit) -> None:
    """Join the group of those who train at the first job, then train the row that `job` asks for, or serve it."""
    problem = _build(**job["problem"])
    row, rank = RowJob(**job["row"]), int(os.environ["RANK"])
    if row.trainers and rank >= row.trainers:
        if row.served:
            serve(row, problem)
        return
    join_group(row.trainers or None)
    if rank and (row.served or row.uneven):
        kind = Served if row.served else LocalSteps
        kind(row, problem, Meter()).follow(row.own_steps(rank))
    else:
        train(row, _kind(row)(row, problem, Meter()), emit)


def _kind(row: RowJob) -> Callable[[RowJob, problems.Problem, Meter], Run]:
    if row.outer:
        return LocalSteps
    if row.served:
        return Served
    if row.stages > 1:
        return Hybrid
    return Sharded if row.shards > 1 else DataParallel


_build: Callable[..., problems.Problem] = functools.lru_cache(maxsize=1)(problems.build)


def train(job: RowJob, run: Run, emit: Emit) -> None:
    """Train one row and emit its events.

    They are "step", "tail" (bytes of the previous step that left late), "loss", and at the end "done" with the
    parameters that differ between ranks, the memory that thinwire takes, and that of the process with a sharded model.
    """
    for step in range(job.most_steps + 1):
        evaluate = step % job.every == 0 or step == job.steps
        if evaluate or step == job.skip:
            emit({"kind": "tail", **run.meter.drain()})
        if evaluate:
            loss = run.held_out_loss()
            emit({"kind": "loss", "step": step, "seconds": run.seconds, "bytes": run.meter.total, "loss": loss})
            there = job.target is None or loss <= job.target or not math.isfinite(loss)
            if step >= job.steps and there:
                break
        if step < job.most_steps:
            emit({"kind": "step", "step": step, **run.step(step)})
    told = {"memory": run.handle.memory._asdict()} if run.handle else {}
    told |= {"process": run.process()} if isinstance(run, Sharded) else {}
    different, waited_for = run.differing(), getattr(run, "waited_for", None)
    emit({"kind": "done", "different": different} | told | ({"waited_for": waited_for} if waited_for else {}))
    gc.collect()  # the row's model is in a reference cycle, and may be large

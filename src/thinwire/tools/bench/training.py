"""One row on one worker: train the problem with one method."""

import gc
import math
from dataclasses import dataclass
from typing import Protocol

from thinwire.schedules import Schedule, exponential_warmup
from thinwire.tools.bench.methods import METHODS
from thinwire.tools.cluster.link import Meter
from thinwire.tools.cluster.worker import Emit


@dataclass(frozen=True, kw_only=True)
class RowJob:
    """What to train. `most_steps` bounds the search for `target` after `steps`; evaluate every `every` steps.

    Figures are taken from step `skip` on. With `stages` above 1 the model is split into so many, each on a worker of
    its own, a batch travels in `micro_batches`, and `boundary` is the share of activations that crosses.
    """

    recipe: str
    density: float
    steps: int
    most_steps: int
    every: int
    skip: int = 0
    target: float | None = None
    warmup: int = 0
    stages: int = 1
    micro_batches: int = 1
    boundary: float = 1.0

    @property
    def scheduled_density(self) -> float | Schedule:
        """The density, over `warmup` steps falling from 1/4 where the method warms up."""
        stages = 4
        if not METHODS[self.recipe].warms_up or self.warmup < stages:
            return self.density
        return exponential_warmup(self.density, steps_each=self.warmup // stages, stages=stages)


class Run(Protocol):
    """A model in training: `data_parallel.DataParallel` or `hybrid.Hybrid`."""

    meter: Meter
    seconds: float

    def step(self, step: int) -> dict[str, float]:
        """Take a step, and return where its time and bytes went."""

    def held_out_loss(self) -> float:
        """Return the loss on the held-out set, without counting the bytes that takes. A collective."""

    def differing(self) -> list[str]:
        """Return the parameters that differ between replicas. A collective."""


def train(job: RowJob, run: Run, emit: Emit) -> None:
    """Train one row and emit its events.

    "step", "tail" (bytes of the step before that were still on their way), "loss", and at last "done" with the
    parameters that differ by rank.
    """
    for step in range(job.most_steps + 1):
        evaluate = step % job.every == 0 or step == job.steps
        if evaluate or step == job.skip:
            emit({"kind": "tail", **run.meter.drain()})
        if evaluate:
            loss = run.held_out_loss()
            emit({"kind": "loss", "step": step, "seconds": run.seconds, "bytes": run.meter.total, "loss": loss})
            if step >= job.steps and _is_over(loss, job.target):
                break
        if step < job.most_steps:
            emit({"kind": "step", "step": step, **run.step(step)})
    emit({"kind": "done", "different": run.differing()})
    gc.collect()  # the row's model is a cycle, and may be large


def _is_over(loss: float, target: float | None) -> bool:
    return target is None or loss <= target or not math.isfinite(loss)

"""What does a step take a worker that has a core to itself, all but sending?

    python -m thinwire_lab.papers.shared.alone --model xml --scale 0.1 --workers 4 --recipes dense,topk:0.001 \\
        --steps 6 --json papers/runs/alone-xml-4.json

Workers are threads of one process on one core, and exchange through memory. Their processor seconds, over their number,
are those of each. `computing`, forward and backward, is the same for all rows; `seconds` are what follows: encoding,
adding up, decoding, the update. `FREE`: a worker that exchanges nothing.
"""

import copy
import os
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from statistics import median
from threading import Barrier, Lock
from typing import Annotated

import torch
import typer
from torch import nn

from thinwire import replicate
from thinwire.recipes import METHODS
from thinwire_lab.bench.results import Setting
from thinwire_lab.bench.rows import percentiles
from thinwire_lab.cluster.virtual import VirtualGroup, on_ranks
from thinwire_lab.inputs import prepare_file, write_document
from thinwire_lab.machine import environment
from thinwire_lab.problems import Problem, build
from thinwire_lab.problems.optimizers import optimizers

FREE = "nothing exchanged"
_WARM_UP = 2  # steps


def main(
    json: Annotated[Path, typer.Option(help="Write the results here.")],
    model: Annotated[str, typer.Option(help="As of `thinwire bench`.")],
    recipes: Annotated[str, typer.Option(help="Rows, as of `thinwire bench`.")],
    workers: Annotated[int, typer.Option(help="Number of workers.")],
    steps: Annotated[int, typer.Option(help="Steps of each row that count.")],
    data: Annotated[Path | None, typer.Option(help="As of `thinwire bench`.")] = None,
    scale: Annotated[float, typer.Option(help="As of `thinwire bench`.")] = 1.0,
) -> None:
    prepare_file(json)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    problem = build(model, seed=0, data=data, scale=scale)
    found = {FREE: step_seconds(problem, None, workers, steps)}
    for name, _, density in (row.partition(":") for row in recipes.split(",")):
        setting = Setting(name, float(density or 1))
        found[setting.label] = step_seconds(problem, setting, workers, steps)
    computing = median(computing for row in found.values() for computing, _ in row)
    seconds = {name: asdict(percentiles([rest for _, rest in row])) for name, row in found.items()}
    made = environment(steps=steps)
    write_document(json, "thinwire.alone/1", environment=made, computing=computing, seconds=seconds)


def step_seconds(problem: Problem, row: Setting | None, workers: int, steps: int) -> list[tuple[float, float]]:
    """Return a worker's processor seconds of each step, after a warm-up: for forward and backward, and for the rest.

    Nothing is exchanged where `row` is None.
    """
    models = [copy.deepcopy(problem.model) for _ in range(workers)]
    read = list[float]()
    turn, together = Lock(), Barrier(workers, lambda: read.append(time.process_time() / workers))

    def train(group: VirtualGroup) -> None:
        model = models[group.rank()]
        (optimizer,) = optimizers("sgd", model, problem)
        reduce = _reducing(model, row, group, optimizer)
        for step in range(_WARM_UP + steps):
            batch = problem.batch(step, group.rank(), workers)
            optimizer.zero_grad()
            together.wait()
            with turn:  # as no other would compute in the caches of its core
                problem.loss(model, batch).backward()
            together.wait()
            reduce()
            optimizer.step()
            together.wait()

    on_ranks(workers, train)
    times = zip(read[::3], read[1::3], read[2::3], strict=True)
    return [(computed - began, end - computed) for began, computed, end in times][_WARM_UP:]


def _reducing(
    model: nn.Module, row: Setting | None, group: VirtualGroup, optimizer: torch.optim.Optimizer
) -> Callable[[], None]:
    if row is None:
        return lambda: None
    method = METHODS[row.recipe]
    handed = [optimizer] if method.momentum else None
    return replicate(model, method.make(row.density), group=group, optimizer=handed).reduce


if __name__ == "__main__":
    typer.run(main)

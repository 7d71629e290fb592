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
from typing import Annotated, NamedTuple

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
    found = {FREE: step_seconds(problem, "", workers, steps)}
    for row in recipes.split(","):
        name, _, density = row.partition(":")
        found[Setting(name, float(density or 1)).label] = step_seconds(problem, row, workers, steps)
    computing = median(each.computing for row in found.values() for each in row)
    seconds = {name: asdict(percentiles([each.rest for each in row])) for name, row in found.items()}
    made = environment(steps=steps)
    write_document(json, "thinwire.alone/1", environment=made, computing=computing, seconds=seconds)


class Taken(NamedTuple):
    """A worker's processor seconds of a step: for forward and backward, and for the rest."""

    computing: float
    rest: float


def step_seconds(problem: Problem, row: str, workers: int, steps: int) -> list[Taken]:
    """Return what each step takes, after a warm-up; nothing is exchanged where `row` is empty."""
    models = [copy.deepcopy(problem.model) for _ in range(workers)]
    turn, together, read = Lock(), Barrier(workers), list[float]()

    def note() -> None:
        if not together.wait():
            read.append(time.process_time() / workers)
        together.wait()

    def train(group: VirtualGroup) -> None:
        model = models[group.rank()]
        (optimizer,) = optimizers("sgd", model, problem)
        reduce = _reducing(model, row, group, optimizer)
        for step in range(_WARM_UP + steps):
            batch = problem.batch(step, group.rank(), workers)
            optimizer.zero_grad()
            note()
            with turn:  # as no other would compute in the caches of its core
                problem.loss(model, batch).backward()
            note()
            reduce()
            optimizer.step()
            note()

    on_ranks(workers, train)
    times = zip(read[::3], read[1::3], read[2::3], strict=True)
    return [Taken(computed - began, end - computed) for began, computed, end in times][_WARM_UP:]


def _reducing(model: nn.Module, row: str, group: VirtualGroup, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    if not row:
        return lambda: None
    name, _, density = row.partition(":")
    recipe, handed = METHODS[name].make(float(density or 1)), [optimizer] if METHODS[name].momentum else None
    return replicate(model, recipe, group=group, optimizer=handed).reduce


if __name__ == "__main__":
    typer.run(main)

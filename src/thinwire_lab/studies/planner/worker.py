"""The workers: they profile, plan, and train with every candidate, the plan and `"auto"` in turns.

A job and its events are JSON; rank 0 emits.
"""

import copy
import functools
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire.integrations import Attachment
from thinwire.memories import ErrorFeedback
from thinwire.planner import Budget, Plan, step_seconds
from thinwire.planner.live import Adaptive
from thinwire.planner.plan import reducer
from thinwire.planner.probe.measure import longest
from thinwire_lab.cluster.worker import Emit
from thinwire_lab.cluster.workers import join_group, wrapped
from thinwire_lab.problems import Problem, build
from thinwire_lab.problems.base import sgd

SMALLEST = 1024  # elements: smaller tensors stay uncompressed where one candidate is used for all
BUDGET = Budget(names=("fp16", "qsgd_l2", "sampled_topk", "sampled_doubling", "sampled_gtopk"), densities=(0.01,))
DENSE, AGAIN, PLANNED, WATCHED = "dense", "dense again", "the plan", "auto"


class Run:
    """A model in training; `attach` puts a method to work on it."""

    def __init__(self, problem: Problem, attach: Callable[[DistributedDataParallel], Attachment | None]) -> None:
        self.problem = problem
        self.model = wrapped(copy.deepcopy(problem.model))
        self.optimizer = sgd(self.model.module, problem)
        self.attachment = attach(self.model)
        self.count = 0

    def loss(self) -> Any:
        """Run forward on the next batch."""
        batch = self.problem.batch(self.count, dist.get_rank(), dist.get_world_size())
        return self.problem.loss(self.model, batch)

    def step(self) -> float:
        """Take a step. Return its seconds, without making the batch."""
        batch = self.problem.batch(self.count, dist.get_rank(), dist.get_world_size())
        self.count += 1
        start = time.perf_counter()
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.problem.loss(self.model, batch)
        loss.backward()
        self.optimizer.step()
        return time.perf_counter() - start


def handle(job: dict[str, Any], emit: Emit) -> None:
    """Measure a cell."""
    join_group()
    cell(problem(**job["problem"]), job["seconds"], emit if dist.get_rank() == 0 else lambda event: None)


@functools.lru_cache(maxsize=1)
def problem(name: str, data: str | None, scale: float) -> Problem:
    """Build the problem once."""
    return build(name, seed=0, data=None if data is None else Path(data), scale=scale)


def cell(training: Problem, budget: float, emit: Emit) -> None:
    """Plan, and train with everything in turns; emit the predictions and the seconds of steps."""
    start = time.perf_counter()
    run = Run(training, lambda model: None)
    plan = thinwire.plan(run.model, run.loss, update=run.optimizer.step, budget=BUDGET)
    emit({"kind": "plan", "seconds": time.perf_counter() - start, "predicted": _predicted(plan)})
    runs: dict[str, Run] = {}
    for name, attach in _methods(training.model, plan):
        start = time.perf_counter()
        runs[name] = Run(training, attach)
        if name == WATCHED:
            emit({"kind": "attached", "seconds": time.perf_counter() - start})
    _let_decide(runs[WATCHED], emit)
    watched = {name: runs.pop(name) for name in (DENSE, WATCHED, AGAIN)}
    times = _in_turns(runs, budget) | _side_by_side(watched, 2 * budget)
    for name, seconds in times.items():
        emit({"kind": "times", "name": name, "seconds": seconds})
    attached = watched[WATCHED].attachment
    assert attached is not None
    emit({"kind": "same", "same": attached.verify_replicas()})


def _predicted(plan: Plan) -> dict[str, float]:
    """Return the predicted seconds of a step for each candidate and for the plan."""
    large = [g.name for g in plan.profile.timeline.gradients if g.numel >= SMALLEST]
    found = {c.name: step_seconds(plan.profile, dict.fromkeys(large, c.name)) for c in BUDGET.candidates()}
    return found | {PLANNED: plan.seconds}


def _methods(
    module: nn.Module, plan: Plan
) -> Iterator[tuple[str, Callable[[DistributedDataParallel], Attachment | None]]]:
    for candidate in BUDGET.candidates()[1:]:
        yield candidate.name, _uniform(module, candidate.name)
    yield PLANNED, lambda model: thinwire.attach(model, plan)
    # side by side, and plain DDP twice, to see the noise between equal runs
    yield DENSE, _uniform(module, DENSE)
    yield WATCHED, lambda model: thinwire.attach(model, BUDGET)
    yield AGAIN, _uniform(module, DENSE)


def _uniform(module: nn.Module, name: str) -> Callable[[DistributedDataParallel], Attachment | None]:
    """Return a function that attaches a candidate for all but small tensors; dense is plain DDP, without a hook."""
    if name == DENSE:
        return lambda model: None
    large = [who for who, p in module.named_parameters() if p.numel() >= SMALLEST]
    return lambda model: thinwire.attach(model, reducer(dict.fromkeys(large, name), ErrorFeedback()))


def _let_decide(run: Run, emit: Emit, most: int = 80) -> None:
    """Train until the policy has decided."""
    start = time.perf_counter()
    while not _history(run) and run.count < most:
        run.step()
    emit({"kind": "decided", "steps": run.count, "seconds": time.perf_counter() - start, "history": _history(run)})


def _history(run: Run) -> list[dict[str, Any]]:
    assert run.attachment is not None
    adaptive = run.attachment.recipe
    assert isinstance(adaptive, Adaptive)
    return [decision._asdict() | {"choice": dict(decision.choice)} for decision in adaptive.history]


def _in_turns(runs: Mapping[str, Run], budget: float, *, lap: int = 4, most: int = 24) -> dict[str, list[float]]:
    """Let runs take turns of a few steps, for about `budget` seconds each. A turn's first step does not count."""
    laps = {name: _count(run, budget / lap, most=most // lap) for name, run in runs.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(max(laps.values())):
        for name, run in runs.items():
            if number < laps[name]:
                times[name] += [run.step() for _ in range(lap + 1)][1:]
    return times


def _side_by_side(runs: Mapping[str, Run], budget: float, *, most: int = 60) -> dict[str, list[float]]:
    """Let runs take single steps in turn, in a rotating order, for about `budget` seconds each."""
    names = list(runs)
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(max(_count(run, budget, most=most) for run in runs.values())):
        place = number % len(names)
        for name in names[place:] + names[:place]:
            times[name].append(runs[name].step())
    return times


def _count(run: Run, budget: float, *, most: int) -> int:
    """Return how many steps of `run` take `budget` seconds, as all ranks see it; from 1 to `most`."""
    group = dist.group.WORLD
    assert group is not None
    typical = longest([run.step() for _ in range(3)][-1], group)
    return max(1, min(most, round(budget / typical)))

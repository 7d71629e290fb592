"""Does the planner keep its word? Real training behind links of many rates, against what it predicted.

    python -m thinwire_lab.studies.planner grid --data ../shared/data --json grid.json
    python -m thinwire_lab.studies.planner grid --models transformer --worlds 2 --links 10mbit/25ms,1gbit/25ms

For each model, number of workers and link: the steps that were predicted, and the steps as measured, of plain
DDP, of every candidate for all tensors, of the plan, and of "auto", which take turns. It ends with the median
error of the predictions, with the regret (by what share of its step the best candidate is faster), and with how much
slower "auto" is than plain DDP where it is slowest.
"""

import copy
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch.distributed as dist
import typer
from rich.console import Console
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire.integrations import Attachment
from thinwire.memories import ErrorFeedback
from thinwire.planner import Budget, Plan, step_seconds
from thinwire.planner.live import Adaptive
from thinwire.planner.plan import reducer
from thinwire.planner.probe.measure import longest
from thinwire_lab.cluster.link import parse_rate
from thinwire_lab.cluster.local import Cluster
from thinwire_lab.cluster.worker import Emit
from thinwire_lab.cluster.workers import join_group, wrapped
from thinwire_lab.inputs import prepare_file, write_document
from thinwire_lab.machine import environment
from thinwire_lab.problems import Problem, build
from thinwire_lab.problems.base import sgd
from thinwire_lab.show.table import plain
from thinwire_lab.show.terminal import print_titled

SMALLEST = 1024  # elements: smaller tensors stay uncompressed where one candidate is used for all
BUDGET = Budget(names=("fp16", "qsgd_l2", "sampled_topk", "sampled_doubling", "sampled_gtopk"), densities=(0.01,))
DENSE, AGAIN, PLANNED, WATCHED = "dense", "dense again", "the plan", "auto"
_MOST = 80  # steps for "auto" to decide


class Run:
    """A model in training; `attach` puts a method to work on it."""

    def __init__(self, problem: Problem, attach: Callable[[DistributedDataParallel], Attachment | None]) -> None:
        self.problem = problem
        self.model = wrapped(copy.deepcopy(problem.model))
        self.optimizer = sgd(self.model.module, problem)
        self.attachment = attach(self.model)
        self.count = 0

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
    join_group()
    found = measure(_build(**job["problem"]), job["seconds"])
    if dist.get_rank() == 0:
        emit(found)


_build: Callable[..., Problem] = functools.lru_cache(maxsize=1)(build)


def measure(training: Problem, budget: float) -> dict[str, Any]:
    """Plan, and train with everything in turns. Return what a `Cell` has of it."""
    start = time.perf_counter()
    run = Run(training, lambda model: None)
    first = training.batch(0, dist.get_rank(), dist.get_world_size())
    plan = thinwire.plan(run.model, lambda: training.loss(run.model, first), update=run.optimizer.step, budget=BUDGET)
    found = {"planning": time.perf_counter() - start, "predicted": _predicted(plan)}
    runs: dict[str, Run] = {}
    for name, attach in _methods(training.model, plan):
        start = time.perf_counter()
        runs[name] = Run(training, attach)
        found |= {"attaching": time.perf_counter() - start} if name == WATCHED else {}
    attached = runs[WATCHED].attachment
    assert attached is not None
    adaptive, start = attached.recipe, time.perf_counter()
    assert isinstance(adaptive, Adaptive)
    while not adaptive.history and runs[WATCHED].count < _MOST:
        runs[WATCHED].step()
    found |= {"deciding": time.perf_counter() - start, "choice": dict(plan.choice), "reason": "undecided"}
    for decision in adaptive.history[-1:]:
        found |= {"reason": decision.reason}
    measured: dict[str, list[float]] = {}
    for names in ((DENSE, WATCHED, AGAIN), (PLANNED, *sorted({*plan.choice.values()} - {DENSE}))):
        measured |= _side_by_side({name: runs[name] for name in names}, 2 * budget)
    measured |= _in_turns({name: run for name, run in runs.items() if name not in measured}, budget)
    found["measured"] = {name: measured[name] for name in runs}
    return found | {"same": attached.verify_replicas()}


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
    # plain DDP twice, to see the noise between equal runs
    yield DENSE, _uniform(module, DENSE)
    yield WATCHED, lambda model: thinwire.attach(model, BUDGET)
    yield AGAIN, _uniform(module, DENSE)


def _uniform(module: nn.Module, name: str) -> Callable[[DistributedDataParallel], Attachment | None]:
    """Return a function that attaches a candidate for all but small tensors; dense is plain DDP, without a hook."""
    if name == DENSE:
        return lambda model: None
    large = [who for who, p in module.named_parameters() if p.numel() >= SMALLEST]
    return lambda model: thinwire.attach(model, reducer(dict.fromkeys(large, name), ErrorFeedback()))


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


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One model, number of workers and link. Seconds of a step: predicted, and of every measured step.

    choice: the plan's. reason: what "auto" said when it decided.
    """

    model: str
    workers: int
    link: str
    predicted: Mapping[str, float]
    measured: Mapping[str, Sequence[float]]
    planning: float
    attaching: float
    deciding: float
    choice: Mapping[str, str]
    reason: str
    same: bool

    def seconds(self, name: str) -> float:
        return median(self.measured[name])

    def error(self, name: str) -> float:
        """Return the error of a prediction, relative to the measurement."""
        return self.predicted[name] / self.seconds(name) - 1

    @property
    def candidates(self) -> list[str]:
        """The candidates that were used for all tensors."""
        return [name for name in self.measured if name not in (AGAIN, PLANNED, WATCHED)]

    @property
    def best(self) -> str:
        return min(self.candidates, key=self.seconds)

    def regret(self, name: str) -> float:
        """By what share of the best candidate's step is this slower?"""
        return max(0.0, self.seconds(name) / self.seconds(self.best) - 1)

    def over_dense(self, name: str) -> float:
        """By what share is a row slower than plain DDP? The median over steps taken side by side."""
        pairs = zip(self.measured[name], self.measured[DENSE], strict=True)
        return median(other / dense for other, dense in pairs) - 1


def summary(cells: Sequence[Cell]) -> dict[str, float]:
    errors = [abs(each.error(name)) for each in cells for name in each.predicted]
    regrets = {name: [each.regret(name) for each in cells] for name in (PLANNED, WATCHED)}
    return {
        "predictions": len(errors),
        "median_error": median(errors),
        "error_p90": sorted(errors)[int(0.9 * (len(errors) - 1))],
        "median_regret": median(regrets[PLANNED]),
        "largest_regret": max(regrets[PLANNED]),
        "median_regret_auto": median(regrets[WATCHED]),
        "largest_regret_auto": max(regrets[WATCHED]),
        "auto_over_dense_most": max(each.over_dense(WATCHED) for each in cells),
        "auto_over_dense_median": median(each.over_dense(WATCHED) for each in cells),
        "dense_again_over_dense_most": max(each.over_dense(AGAIN) for each in cells),
        "dense_again_over_dense_least": min(each.over_dense(AGAIN) for each in cells),
    }


HANDLER = "thinwire_lab.studies.planner:handle"

app = typer.Typer(add_completion=False, help=__doc__, pretty_exceptions_enable=False)
console = Console()


@app.callback()
def planner() -> None:
    """Measure what the planner predicts."""


@app.command()
def grid(
    models: Annotated[str, typer.Option(help="Of transformer, xml, resnet20.")] = "transformer,xml,resnet20",
    worlds: Annotated[str, typer.Option(help="Numbers of workers.")] = "2,4",
    links: Annotated[
        str, typer.Option(help="Rates of the workers' links, or none.")
    ] = "none,1gbit,300mbit,100mbit,30mbit",
    data: Annotated[Path | None, typer.Option(help="Folder that holds cifar10/*.npz, for resnet20.")] = None,
    seconds: Annotated[float, typer.Option(help="Training that each row is measured for.")] = 2.5,
    json: Annotated[Path | None, typer.Option(help="Write the results here, after each cell.")] = None,
) -> None:
    """Run the grid."""
    prepare_file(json)
    cells: list[Cell] = []
    for model, problem in _problems(models, data).items():
        for workers in map(int, worlds.split(",")):
            for link in links.split(","):
                cells.append(_cell(model, {"problem": problem, "seconds": seconds}, workers, link))
                print_titled(console, plain(_rows(cells[-1]), title=_title(cells[-1])))
                about = {"environment": environment(budget=str(BUDGET)), "summary": summary(cells)}
                write_document(json, "thinwire.grid/1", **about, cells=[asdict(each) for each in cells])
    found = summary(cells)
    for name, value in found.items():
        text = f"{value:.0f}" if name == "predictions" else f"{value:.1%}"
        console.print(f"{name.replace('_', ' ')}: {text}", highlight=False)


def _cell(model: str, job: dict[str, Any], workers: int, link: str) -> Cell:
    """Measure a cell, on workers of its own: a link keeps its latency."""
    with Cluster(workers, parse_rate(link) or parse_rate("1gbit"), HANDLER) as cluster:
        if not cluster.throttled:
            raise typer.BadParameter(f"links cannot be limited here: {cluster.label}")
        cluster.limit(parse_rate(link))
        ((_, found),) = cluster.run(job)
        return Cell(model=model, workers=workers, link=link, **found)


def _problems(models: str, data: Path | None) -> dict[str, dict[str, Any]]:
    """Return what to build for each model; resnet20 without its data is left out, which is said, beside others."""
    images = None if data is None else next((str(path) for path in sorted((data / "cifar10").glob("*.npz"))), None)
    known = {
        "transformer": {"name": "transformer", "seed": 0},
        "xml": {"name": "xml", "seed": 0, "scale": 0.02},
        "resnet20": {"name": "resnet20", "seed": 0, "data": images},
    }
    asked = models.split(",")
    if unknown := [model for model in asked if model not in known]:
        raise typer.BadParameter(f"no model here is called {unknown[0]!r}; expected some of {', '.join(known)}")
    if "resnet20" in asked and images is None:
        asked = [model for model in asked if model != "resnet20"]
        needs = "resnet20 needs --data, a folder that holds cifar10/*.npz"
        if not asked:
            raise typer.BadParameter(needs)
        console.print(f"{needs}; it is left out", style="red")
    return {model: known[model] for model in asked}


def _title(found: Cell) -> str:
    return (
        f"{found.model}, {found.workers} workers, {found.link}: planned in {found.planning:.1f} s; auto: wrapped and "
        f"attached in {found.attaching:.1f} s, decided after {found.deciding:.1f} s of training; replicas "
        f"{'identical' if found.same else 'DIFFER'}\n{found.reason}"
    )


def _rows(found: Cell) -> list[dict[str, Any]]:
    """Return a row for all that was measured, in milliseconds."""
    return [
        {
            "name": name,
            "measured_ms": 1e3 * found.seconds(name),
            "predicted_ms": 1e3 * found.predicted[name] if name in found.predicted else None,
            "error": found.error(name) if name in found.predicted else None,
            "regret": found.regret(name) if name in (PLANNED, WATCHED) else None,
            "over_dense": found.over_dense(name) if name in (AGAIN, WATCHED) else None,
        }
        for name in found.measured
    ]


if __name__ == "__main__":
    app()

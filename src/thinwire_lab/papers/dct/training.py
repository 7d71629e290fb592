"""A problem's model with modules at its cuts, one training of it, and the results, from which a comparison goes on."""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from statistics import fmean
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.pipeline import Boundary, Report
from thinwire_lab.inputs import reading, require, write_document
from thinwire_lab.problems import Batch, Problem
from thinwire_lab.problems.base import hits as right

INSIDE = {
    "dlrm": ("bottom.2", "bottom.4", "top.2", "top.4", "top.6"),
    "transformer": ("blocks.0.down", "blocks.1.down"),
}
"""Layers within stages whose input comes from an activation function, in the order in which to cut them."""

Make = Callable[[], nn.Module]


class Network(nn.Module):
    """A copy of the model in `cuts` + 1 stages, with a `make()` between stages and before `inside` layers."""

    def __init__(self, problem: Problem, cuts: int, inside: int, make: Make) -> None:
        super().__init__()
        assert problem.parts is not None  # for the type checker
        model = deepcopy(problem.model)
        self.model, self.parts = model, problem.parts
        self.stages = nn.ModuleList(self.parts.split(model, cuts + 1) if cuts else [model])
        self.between = nn.ModuleList(make() for _ in range(cuts))
        self.before = nn.ModuleList(self._cut(name, make()) for name in INSIDE.get(problem.name, ())[:inside])

    def _cut(self, layer: str, crossing: nn.Module) -> nn.Module:
        self.model.get_submodule(layer).register_forward_pre_hook(lambda _, arguments: (crossing(*arguments),))
        return crossing

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the output and its target."""
        arguments, named, target = self.parts.feed(batch)
        x = self.stages[0](*arguments, **named)
        for crossing, stage in zip(self.between, self.stages[1:], strict=True):
            x = stage(crossing(x), **named)
        return x, target

    def loss(self, batch: Batch) -> Tensor:
        """Return the mean loss in nats, a scalar."""
        return self.parts.criterion(*self(batch))

    @property
    def boundaries(self) -> list[Boundary]:
        """The modules that report what they let through."""
        return [part for part in (*self.between, *self.before) if isinstance(part, Boundary)]


SEEN = 48
"""How many training batches, evenly spaced, the training loss is taken over."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """The results of a training. NaN: it diverged, or nothing is counted.

    Losses are in nats, of the network as trained (in eval mode, with its boundaries): over training batches, and over
    the held-out set. Real densities are means over the cuts: kept and nonzero over the whole training, kept over its
    last tenth, and kept on the held-out set.
    """

    problem: str
    row: str
    seed: int
    density: float
    train_loss: float
    held_out_loss: float
    train_accuracy: float
    held_out_accuracy: float
    kept: float
    nonzero: float
    kept_late: float
    kept_held_out: float
    diverged_at: int | None
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Material:
    """A problem, and the batches it trains on in their order, the same for every row."""

    problem: Problem
    batches: Sequence[Batch]

    @property
    def seen(self) -> list[Batch]:
        count = len(self.batches)
        return [self.batches[place * count // min(SEEN, count)] for place in range(min(SEEN, count))]


def run(material: Material, row: str, seed: int, density: float, cuts: int, inside: int, make: Make) -> Run:
    began, network = perf_counter(), Network(material.problem, cuts, inside, make)
    diverged, reports = train(network, material)
    trained, held = _evaluated(network, material, diverged)
    late = len(network.boundaries) * max(1, len(material.batches) // 10)
    return Run(
        problem=material.problem.name,
        row=row,
        seed=seed,
        density=density,
        train_loss=trained[0],
        held_out_loss=held[0],
        train_accuracy=trained[1],
        held_out_accuracy=held[1],
        kept=_mean(report.kept for report in reports),
        nonzero=_mean(report.nonzero for report in reports),
        kept_late=_mean(report.kept for report in reports[-late:]),
        kept_held_out=_mean(boundary.report().kept for boundary in network.boundaries),
        diverged_at=diverged,
        seconds=perf_counter() - began,
    )


def train(network: Network, material: Material) -> tuple[int | None, list[Report]]:
    """Train it. Return the step at which the loss diverged, and what every boundary let through at every step."""
    problem, reports = material.problem, list[Report]()
    optimizer = torch.optim.SGD(network.model.parameters(), lr=problem.learning_rate, momentum=problem.momentum)
    for step, batch in enumerate(material.batches):
        optimizer.zero_grad()
        loss = network.loss(batch)
        if not math.isfinite(float(loss.detach())):
            return step, reports
        loss.backward()
        optimizer.step()
        reports += [boundary.report() for boundary in network.boundaries]
    return None, reports


def _evaluated(network: Network, material: Material, diverged: int | None) -> list[tuple[float, float]]:
    """Return loss and accuracy over training batches, and over the held-out set."""
    if diverged is not None:
        return [(math.nan, math.nan)] * 2
    network.eval()
    trained = evaluate(network, material.seen)
    for boundary in network.boundaries:
        boundary.report()
    return [trained, evaluate(network, material.problem.held_out(0, 1))]


@torch.no_grad()
def evaluate(network: Network, batches: Sequence[Batch]) -> tuple[float, float]:
    """Return the mean loss in nats, and the accuracy: the share of targets with the largest output."""
    losses, hits = list[float](), list[float]()
    for batch in batches:
        output, target = network(batch)
        losses.append(float(network.parts.criterion(output, target)))
        hits.append(float(right(output, target).double().mean()))
    return fmean(losses), fmean(hits)


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return fmean(found) if found else math.nan


SCHEMA = "thinwire.pipeline_accuracy/1"


@dataclass(kw_only=True)
class Document:
    """`settings`: what the runs of each problem share. `runs`: by problem, row and seed."""

    environment: Mapping[str, Any]
    settings: dict[str, Any] = field(default_factory=dict)
    runs: dict[tuple[str, str, int], Run] = field(default_factory=dict)

    def add(self, run: Run) -> None:
        self.runs[run.problem, run.row, run.seed] = run

    def of(self, problem: str, row: str) -> list[Run]:
        """Return the runs of a row, by seed."""
        found = (run for (*place, _), run in self.runs.items() if place == [problem, row])
        return sorted(found, key=lambda run: run.seed)

    def write(self, path: Path) -> None:
        """Write it; NaN becomes null."""
        runs = [{key: None if x != x else x for key, x in asdict(run).items()} for run in self.runs.values()]
        write_document(path, SCHEMA, environment=dict(self.environment), settings=self.settings, runs=runs)

    @classmethod
    def read(cls, path: Path) -> "Document":
        """Read what was written. Raises BadInput."""
        with reading(path, f"a document of {SCHEMA}"):
            found = json.loads(path.read_text())
            require(found["schema"] == SCHEMA, path, f"a document of {SCHEMA}, not of {found['schema']!r}")
            document = cls(environment=found["environment"], settings=found["settings"])
            for entry in found["runs"]:
                known: dict[str, Any] = {each.name: entry[each.name] for each in fields(Run)}
                known |= {key: math.nan for key, x in known.items() if x is None and key != "diverged_at"}
                document.add(Run(**known))
        return document


def over(runs: Sequence[Run], baseline: Sequence[Run]) -> Iterator[float]:
    """Yield, for each run, by how many percent its held-out loss is above the baseline's with the same seed."""
    known = {run.seed: run.held_out_loss for run in baseline}
    yield from (100 * (run.held_out_loss / known[run.seed] - 1) for run in runs if run.seed in known)

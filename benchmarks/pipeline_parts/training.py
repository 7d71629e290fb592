"""One training, and what came of it."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from time import perf_counter

import torch
from torch import Tensor

from pipeline_parts.network import Make, Network
from thinwire.pipeline import Report
from thinwire.tools.problems import Batch, Problem

SEEN = 48
"""How many of the batches trained on the training loss is taken over, evenly spaced."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a training came to; NaN where it diverged, and where nothing is counted.

    Losses are in nats, of the network as it was trained (in eval mode, boundaries and all): over batches it was trained
    on, and over the held-out set. Real densities are means over the cuts: kept and not zero over the whole of training,
    kept over its last tenth, and kept of what was held out.
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
        """Some of these, evenly spaced."""
        count = len(self.batches)
        return [self.batches[place * count // min(SEEN, count)] for place in range(min(SEEN, count))]


def run(material: Material, row: str, seed: int, density: float, cuts: int, inside: int, make: Make) -> Run:
    """Train a copy of the model and evaluate it."""
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
    """Train it; return when the loss was no number any more, and what every boundary let through at every step."""
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
    """Return loss and accuracy over batches trained on, and over the held-out set."""
    if diverged is not None:
        return [(math.nan, math.nan)] * 2
    network.eval()
    trained = evaluate(network, material.seen)
    for boundary in network.boundaries:
        boundary.report()
    return [trained, evaluate(network, material.problem.held_out(0, 1))]


@torch.no_grad()
def evaluate(network: Network, batches: Sequence[Batch]) -> tuple[float, float]:
    """Return mean loss in nats, and the share of targets that the largest output names."""
    losses, hits = list[float](), list[float]()
    for batch in batches:
        output, target = network(batch)
        losses.append(float(network.parts.criterion(output, target)))
        hits.append(float((_named(output).view_as(target) == target).double().mean()))
    return fmean(losses), fmean(hits)


def _named(output: Tensor) -> Tensor:
    """The class of the largest logit; of a single one, whether it is positive."""
    return output.argmax(-1) if output.shape[-1] > 1 else (output > 0).long()


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return fmean(found) if found else math.nan

"""Small networks and made-up data for the loops, in float64, so that differences are not due to rounding."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

INPUTS, HIDDEN, OUTPUTS, BATCH = 16, 48, 4, 16

Sample = tuple[Tensor, Tensor]


class Attach(Protocol):
    """Puts a recipe to work on a DDP model, or leaves the model to plain DDP."""

    def __call__(
        self,
        model: DistributedDataParallel,
        *optimizers: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        """Attach; the optimizers are all those that step on the model's parameters."""


class Unavailable(RuntimeError):  # noqa: N818 - it reads better where it is raised and caught
    """This machine cannot run a loop; the message says why."""


@dataclass(kw_only=True)
class Outcome:
    """What a loop returns: the loss of every step on this rank, and the steps it skipped by hand."""

    losses: list[float] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)


def network(seed: int = 0, *, inputs: int = INPUTS, outputs: int = OUTPUTS) -> nn.Sequential:
    """Return three layers, the same on every rank."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = [nn.Linear(inputs, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, HIDDEN), nn.Tanh()]
        return nn.Sequential(*layers, nn.Linear(HIDDEN, outputs)).double()


def batches(steps: int, *, start: int = 0) -> Iterator[Sample]:
    """Yield this rank's batches of a task that `network` can learn: inputs and targets."""
    for step in range(start, start + steps):
        x = noise(step, INPUTS)
        yield x, (2 * x[:, :OUTPUTS]).sin() + x[:, OUTPUTS : 2 * OUTPUTS]


def micro_batches(steps: int, count: int) -> Iterator[list[Sample]]:
    """Yield `count` batches per step."""
    stream = batches(steps * count)
    for _ in range(steps):
        yield [next(stream) for _ in range(count)]


def noise(number: int, width: int, *, stream: int = 0) -> Tensor:
    """Return this rank's normal draws of that number: BATCH x width."""
    seed = (number * 8 + stream) * 64 + dist.get_rank()
    return torch.randn(BATCH, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def all_finite(model: nn.Module) -> bool:
    """Whether every gradient is finite."""
    return all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)

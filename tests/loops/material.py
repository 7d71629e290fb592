"""Small networks and made-up data for the loops, in float64, so that differences are not due to rounding."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

INPUTS, HIDDEN, OUTPUTS, BATCH = 16, 48, 4, 16

Sample = tuple[Tensor, Tensor]
MOMENTUM = partial(SGD, lr=0.05, momentum=0.9, weight_decay=1e-4)
"""The optimizer of most loops."""


class Attach(Protocol):
    """Puts a recipe to work on a DDP model, or leaves the model to plain DDP."""

    def __call__(
        self,
        model: DistributedDataParallel,
        *optimizers: Optimizer,
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


def attached(
    make: Attach,
    optimize: Callable[..., Optimizer] = MOMENTUM,
    module: nn.Module | None = None,
    **options: Any,
) -> tuple[DistributedDataParallel, Optimizer]:
    """Return a module in DDP, by default the network, and its optimizer, after `make`. options: of DDP."""
    model = DistributedDataParallel(network() if module is None else module, **options)
    optimizer = optimize(model.parameters())
    make(model, optimizer)
    return model, optimizer


def train(
    model: Callable[[Tensor], Tensor],
    optimizers: Optimizer | Sequence[Optimizer],
    steps: int,
    *,
    loss: Callable[[int, Tensor, Tensor], Tensor] | None = None,
    skips: Callable[[], object] = lambda: False,
    after: Callable[[], object] = lambda: None,
    start: int = 0,
    **clearing: bool,
) -> Outcome:
    """Take steps as everybody does: forward, backward, step.

    loss: of a step, its inputs and targets; by default the squared error. skips: whether to leave a step out, asked
    after backward; it may change gradients, too. after: called behind each step. clearing: options of `zero_grad`.
    """
    several, seen = [optimizers] if isinstance(optimizers, Optimizer) else optimizers, Outcome()
    for step, (x, target) in enumerate(batches(steps, start=start)):
        for each in several:
            each.zero_grad(**clearing)
        found = mse_loss(model(x), target) if loss is None else loss(step, x, target)
        found.backward()
        if skips():
            seen.skipped.append(step)
            continue
        for each in several:
            each.step()
        after()
        seen.losses.append(found.item())
    return seen


def gradient_norm(model: nn.Module) -> float:
    """Return the norm of all gradients together."""
    return float(nn.utils.get_total_norm(p.grad for p in model.parameters() if p.grad is not None))

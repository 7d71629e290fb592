"""Run one loop with one recipe on this rank. How far from plain DDP does it end?"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from statistics import fmean

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from loops import LOOPS
from loops.recipes import Way

LAST = 5
"""The last loss is a mean of so many, because batches differ."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """Where a loop ended on one rank: all parameters of all its models as one vector, at the start and at the end."""

    start: Tensor
    end: Tensor
    losses: list[float]
    skipped: list[int]

    @property
    def last_loss(self) -> float:
        """Mean loss of the last steps."""
        return fmean(self.losses[-LAST:])

    def share(self, plain: "Ended") -> float:
        """Return how far the loss fell, relative to plain DDP: 1 is as far, below 0 it rose."""
        return (plain.losses[0] - self.last_loss) / (plain.losses[0] - plain.last_loss)

    def distance(self, plain: "Ended") -> float:
        """Return ‖end - plain DDP's end‖ / ‖how far plain DDP moved‖."""
        return float((self.end - plain.end).norm() / (plain.end - plain.start).norm())


@dataclass(kw_only=True)
class Attaching:
    """What a loop gets as `make`. With `way` None, models stay plain DDP. Parameters are noted either way."""

    way: Way | None
    modules: list[nn.Module] = field(default_factory=list)
    start: dict[nn.Parameter, Tensor] = field(default_factory=dict)

    def __call__(
        self,
        model: DistributedDataParallel,
        *optimizers: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        """Attach, and keep no reference to the DDP model: a loop may drop it."""
        for p in model.module.parameters():
            self.start.setdefault(p, p.detach().clone())
        if self.way is None:
            return
        recipe = self.way.reducer(optimized=bool(optimizers))
        given = optimizers if self.way.momentum else ()
        tw.attach(model, recipe, optimizer=given, scaler=scaler)


def measure(loop: str, way: Way | None, steps: int) -> Ended:
    """Run a loop; raises what it raises. A collective."""
    make = Attaching(way=way)
    with _traced() if loop == "compiled" else nullcontext():
        outcome = LOOPS[loop](make, steps)
    start = torch.cat([tensor.flatten() for tensor in make.start.values()])
    end = torch.cat([p.detach().flatten() for p in make.start])
    return Ended(start=start, end=end, losses=outcome.losses, skipped=outcome.skipped)


@contextmanager
def _traced() -> Iterator[None]:
    """Silence the tracer's warnings about its own doing, and make it forget what it traced."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            torch.compiler.reset()


def identical(vector: Tensor) -> bool:
    """Whether all ranks hold the same bits. A collective."""
    found = [torch.empty_like(vector) for _ in range(dist.get_world_size())]
    dist.all_gather(found, vector)
    return all(torch.equal(found[0].view(torch.int64), other.view(torch.int64)) for other in found)

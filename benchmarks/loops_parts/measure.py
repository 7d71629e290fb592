"""One loop with one recipe on this rank, and how far it ends from where plain DDP does."""

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
from loops_parts.recipes import Way
from loops_parts.scripts import LOOPS

LAST = 5
"""So many losses the last one is a mean of: batches differ."""


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
        """Return how much of the way that plain DDP took down in loss this one took; 1 is all of it, below 0 is up."""
        return (plain.losses[0] - self.last_loss) / (plain.losses[0] - plain.last_loss)

    def distance(self, plain: "Ended") -> float:
        """Return ‖end - plain DDP's end‖ / ‖how far plain DDP moved‖."""
        return float((self.end - plain.end).norm() / (plain.end - plain.start).norm())


@dataclass(kw_only=True)
class Attaching:
    """What a loop gets as `make`. `way` None leaves models to plain DDP; either way, parameters are noted."""

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
    """Hush the tracer, which warns of what it does itself, and let it forget what it traced."""
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

"""What a training problem is, what a user may ask of one, and how an unusable request is refused."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = tuple[Tensor, ...]
"""What one step computes its loss on; in these problems (inputs, integer targets)."""


class BadInput(ValueError):  # noqa: N818 - it reads better where it is raised and caught
    """Something the user gave cannot be used; the message is one line and says what was expected and the fix."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Data, model and hyper-parameters; everything is float32 on the CPU and a function of the seed alone.

    model: the network at its initial weights, the same on every rank.
    batch: (step, rank, world) -> that rank's training batch of that step; different on every rank and step.
    loss: (model, batch) -> mean loss in nats, a scalar; the model may be wrapped in DistributedDataParallel.
    held_out: (rank, world) -> that rank's share of one fixed held-out set, in batches of equal size; every rank
        gets as many, so the mean over batches and then ranks is the mean over the set. Raises BadInput where the
        set has fewer samples than there are ranks.
    learning_rate, momentum: for plain SGD at a constant rate.
    """

    name: str
    description: str
    model: nn.Module
    batch: Callable[[int, int, int], Batch]
    loss: Callable[[nn.Module, Batch], Tensor]
    held_out: Callable[[int, int], list[Batch]]
    learning_rate: float
    momentum: float = 0.9


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the user may choose about a problem; `scale` multiplies its parameter count."""

    seed: int
    data: Path | None = None
    scale: float = 1.0

    def path(self, what: str) -> Path:
        """Where the data lies; raises BadInput, saying `what` it should name, where the user did not tell."""
        if self.data is None:
            raise BadInput(f"this model needs data; point --data at {what}")
        return self.data


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Within, torch's CPU generator starts from `seed`; afterwards it is back where it was."""
    with torch.random.fork_rng(devices=[]):
        # torch.manual_seed would also reseed every GPU, which fork_rng leaves alone here.
        torch.default_generator.manual_seed(seed)
        yield


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    """Mean cross entropy in nats of int64 targets (...) under the model's logits (..., classes), a scalar."""
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


def size(model: nn.Module) -> str:
    """How many parameters the model has, for a description; a shared one counts once."""
    return f"{sum(parameter.numel() for parameter in model.parameters()):,} parameters"

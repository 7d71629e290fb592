"""A training problem, the options that a user has, and the refusal of unusable ones."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thinwire.integrations.replicas.managed import sparse_weights
from thinwire_lab.inputs import BadInput

Batch = tuple[Tensor, ...]
"""The data of one step: one or two input tensors, then integer targets."""


Feed = tuple[tuple[Tensor, ...], dict[str, Tensor], Tensor]
"""Arguments of a pipeline's first stage, keyword arguments of every stage, and the target; batch dimension first."""


@dataclass(frozen=True, kw_only=True)
class Parts:
    """How to split a model into the stages of a pipeline.

    split: (the problem's model or a deep copy of it, number of stages) -> the stages in order, made of the model's own
        submodules. Run in order, they compute the same as the model, bit for bit; each ignores keyword arguments that
        it does not need. Raises BadInput if the model cannot be split into that many.
    feed: a batch -> the arguments of the stages and of the criterion.
    criterion: (output of the last stage, target) -> mean loss in nats, a scalar.
    """

    split: Callable[[nn.Module, int], list[nn.Module]]
    feed: Callable[[Batch], Feed]
    criterion: Callable[[Tensor, Tensor], Tensor]

    def loss(self, stages: Iterable[nn.Module], batch: Batch) -> Tensor:
        """Return the mean loss in nats of all stages in order, each fed with what the one before it sends, a scalar."""
        args, kwargs, target = self.feed(batch)
        for stage in stages:
            output = stage(*args, **kwargs)
            args = output if isinstance(output, tuple) else (output,)
        return self.criterion(args[0], target)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Data, model and hyper-parameters; everything is float32 on the CPU and a function of the seed alone.

    model: the network at its initial weights, the same on every rank.
    batch: (step, rank, world) -> that rank's training batch of that step; different on every rank and step.
    loss: (model, batch) -> mean loss in nats, a scalar; the model may be wrapped in DistributedDataParallel.
    held_out: (rank, world) -> that rank's share of one fixed held-out set, in batches of equal size; every rank gets
        the same number, so the mean over batches and then ranks is the mean over the set. Raises BadInput if the set
        has fewer samples than there are ranks.
    learning_rate, momentum: for plain SGD at a constant rate.
    parts: how to split the model into pipeline stages; None if it cannot be split.
    """

    name: str
    description: str
    model: nn.Module
    batch: Callable[[int, int, int], Batch]
    loss: Callable[[nn.Module, Batch], Tensor]
    held_out: Callable[[int, int], list[Batch]]
    learning_rate: float
    momentum: float = 0.9
    parts: Parts | None = None


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the user may choose about a problem; `scale` multiplies its parameter count."""

    seed: int
    data: Path | None = None
    scale: float = 1.0

    def path(self, what: str) -> Path:
        """The path of the data. If the user gave none, raises BadInput that says `what` it should name."""
        if self.data is None:
            raise BadInput(f"this model needs data; point --data at {what}")
        return self.data


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch's CPU generator within the block; restore it afterwards."""
    with torch.random.fork_rng(devices=[]):
        # torch.manual_seed would also reseed every GPU, which fork_rng leaves alone here.
        torch.default_generator.manual_seed(seed)
        yield


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    """Mean cross entropy in nats of int64 targets (...) under the model's logits (..., classes), a scalar."""
    inputs, targets = batch
    return classes(model(inputs), targets)


def classes(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy in nats of int64 targets (...) under logits (..., classes), a scalar."""
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


@torch.no_grad()
def held_out_loss(problem: Problem, model: nn.Module, rank: int = 0, world: int = 1) -> Tensor:
    """Mean loss in nats of a model, in eval mode from then on, over a rank's share of the held-out set, a scalar."""
    model.eval()
    return torch.stack([problem.loss(model, batch) for batch in problem.held_out(rank, world)]).mean()


def hits(output: Tensor, targets: Tensor) -> Tensor:
    """Where an output (..., classes) is right: its largest logit is the target's, or a single one's sign is."""
    named = output.argmax(-1) if output.shape[-1] > 1 else (output > 0).long()
    return named.view_as(targets) == targets


def size(model: nn.Module) -> str:
    """The model's number of parameters, for a description; a shared one counts once."""
    return f"{sum(parameter.numel() for parameter in model.parameters()):,} parameters"


def sgd(model: nn.Module, problem: Problem) -> torch.optim.SGD:
    """SGD with momentum. Embeddings with sparse gradients get none: their momentum would get denser every step."""
    sparse = sparse_weights(model)
    groups: list[dict[str, Any]] = [
        {"params": [p for p in model.parameters() if p not in sparse]},
        {"params": [p for p in model.parameters() if p in sparse], "momentum": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.SGD(groups, lr=problem.learning_rate, momentum=problem.momentum)

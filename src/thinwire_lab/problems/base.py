"""A training problem: what a user chooses of it, its batches, its learning rates, and its stages."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from thinwire.integrations.replicas.asked import sparse_weights
from thinwire_lab.inputs import BadInput


class Rates(NamedTuple):
    """Learning rates, constant over a run: of SGD with momentum 0.9, of AdamW, and of Muon.

    Muon's updates are scaled to the size of AdamW's (`adjust_lr_fn="match_rms_adamw"`), so the two rates compare. What
    is no matrix trains with AdamW, at AdamW's rate.
    """

    sgd: float
    adamw: float
    muon: float


RATES: Mapping[str, Rates] = MappingProxyType(
    {
        "transformer": Rates(sgd=0.1, adamw=2e-3, muon=4.5e-3),
        "lstm": Rates(sgd=2.0, adamw=2e-3, muon=2e-3),
        "lstm_sparse": Rates(sgd=2.0, adamw=2e-3, muon=2e-3),
        "mlp": Rates(sgd=0.05, adamw=1e-3, muon=2e-3),
        "resnet20": Rates(sgd=0.05, adamw=2e-3, muon=2e-3),
        "vgg": Rates(sgd=0.05, adamw=1e-3, muon=2e-3),
        "dlrm": Rates(sgd=0.1, adamw=2e-3, muon=2e-3),
        "xml": Rates(sgd=10.0, adamw=1e-3, muon=2e-3),
    }
)
"""By the problem's name."""


Batch = tuple[Tensor, ...]
"""The data of one step: one or two input tensors, then integer targets."""


Feed = tuple[tuple[Tensor, ...], dict[str, Tensor], Tensor]
"""Arguments of a pipeline's first stage, keyword arguments of every stage, and the target; batch dimension first."""


def feed(batch: Batch) -> Feed:
    """`Parts.feed` of a model that reads one tensor: (inputs, targets) -> those, and no keyword arguments."""
    inputs, targets = batch
    return (inputs,), {}, targets


def classes(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy in nats of int64 targets (...) under logits (..., classes), a scalar."""
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


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
    feed: Callable[[Batch], Feed] = feed
    criterion: Callable[[Tensor, Tensor], Tensor] = classes

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


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    """Mean cross entropy in nats of int64 targets (...) under the model's logits (..., classes), a scalar."""
    inputs, targets = batch
    return classes(model(inputs), targets)


@torch.no_grad()
def held_out_loss(problem: Problem, model: nn.Module, rank: int = 0, world: int = 1) -> Tensor:
    """Mean loss in nats of a model, in eval mode from then on, over a rank's share of the held-out set, a scalar."""
    model.eval()
    return torch.stack([problem.loss(model, batch) for batch in problem.held_out(rank, world)]).mean()


def hits(output: Tensor, targets: Tensor) -> Tensor:
    """Where an output (..., classes) is right: its largest logit is the target's, or a single one's sign is."""
    named = output.argmax(-1) if output.shape[-1] > 1 else (output > 0).long()
    return named.view_as(targets) == targets


def sgd(model: nn.Module, problem: Problem) -> torch.optim.SGD:
    """SGD with momentum. Embeddings with sparse gradients get none: their momentum would get denser every step."""
    sparse = sparse_weights(model)
    groups: list[dict[str, Any]] = [
        {"params": [p for p in model.parameters() if p not in sparse]},
        {"params": [p for p in model.parameters() if p in sparse], "momentum": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.SGD(groups, lr=problem.learning_rate, momentum=problem.momentum)


Indices = NDArray[np.int64]
Draw = Callable[[np.random.Generator], Batch]
Take = Callable[[Indices], Batch]


def held_out(samples: Indices, batch_size: int, take: Take) -> Callable[[int, int], list[Batch]]:
    """A `Problem.held_out` over the samples of these indices, in batches of at most `batch_size`."""
    return lambda rank, world: [take(chunk) for chunk in share(samples, rank, world, batch_size)]


def made(
    name: str,
    title: str,
    source: str,
    *,
    options: Options,
    network: Callable[[], nn.Module],
    draw: Draw,
    rest: Callable[[int, int], list[Batch]],
    loss: Callable[[nn.Module, Batch], Tensor] = cross_entropy,
    parts: Parts | None = None,
) -> Problem:
    """The problem of that name: a `network` drawn by the seed, batches that `draw` gives, and the `held_out` rest.

    Every batch has a generator of its own, so that none depends on another.
    """
    with torch.random.fork_rng(devices=[]):
        # torch.manual_seed would also reseed every GPU, which fork_rng leaves alone here.
        torch.default_generator.manual_seed(options.seed)
        model = network()
    parameters = sum(p.numel() for p in model.parameters())  # a shared one counts once
    return Problem(
        name=name,
        description=f"{title}, {parameters:,} parameters, on {source}",
        model=model,
        batch=lambda step, rank, world: draw(np.random.default_rng((options.seed, step, rank, world))),
        loss=loss,
        held_out=rest,
        learning_rate=RATES[name].sgd,
        parts=parts,
    )


def share(samples: Indices, rank: int, world: int, batch_size: int) -> list[Indices]:
    """Every world-th sample from number `rank` on, in equal batches of up to `batch_size`; all ranks get as many.

    A remainder is left out: less than one sample per batch and rank. Raises BadInput if there are fewer samples than
    ranks.
    """
    each = len(samples) // world
    if each == 0:
        raise BadInput(f"{len(samples)} held-out samples cannot be shared by {world} workers; use fewer workers")
    count = -(-each // batch_size)
    return np.split(samples[rank::world][: each // count * count], count)


def spaced(count: int, limit: int) -> Indices:
    """At most `limit` of the indices below `count`, evenly spaced."""
    return np.linspace(0, count, min(count, limit), endpoint=False).astype(np.int64)


class Chain(nn.Sequential):
    """A Sequential that ignores the keyword arguments a pipeline hands to every stage. A slice is a Chain too."""

    def forward(self, input: Tensor, **_: Any) -> Tensor:
        """Run the modules one after another."""
        return super().forward(input)


def chosen(name: str, known: Mapping[int, list[nn.Module]], stages: int) -> list[nn.Module]:
    """Return the split into that many stages; raises BadInput if there is none."""
    if stages not in known:
        numbers = " or ".join(map(str, known))
        raise BadInput(f"the model {name} can be split into {numbers} stages, not {stages}; choose {numbers}")
    return known[stages]


def parts_of(problem: Problem) -> Parts:
    """Return how to split the problem's model into stages; raises BadInput if it cannot be split."""
    if problem.parts is None:
        raise BadInput(f"the model {problem.name} cannot be split into stages; leave --pipeline out")
    return problem.parts


def check_stages(problem: Problem, stages: int, micro_batches: int) -> None:
    """Raise BadInput unless the model can be split into `stages` and its batches into `micro_batches` equal parts."""
    parts = parts_of(problem)
    parts.split(problem.model, stages)
    (first, *_), _, _ = parts.feed(problem.batch(0, 0, 1))
    if len(first) % micro_batches:
        raise BadInput(
            f"--micro-batches {micro_batches} does not divide the batch of {len(first)} that {problem.name} has"
        )

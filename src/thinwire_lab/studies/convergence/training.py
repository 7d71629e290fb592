"""Training with virtual workers: one process, a thread for each rank, and everything else as in a real run."""

import copy
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from threading import Lock
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from thinwire import codecs, exchanges, formats, memories, outer, outer_steps, recipes, reducer, replicate, schedules
from thinwire.integrations.training.gradients import buckets
from thinwire.outer_steps import OuterSteps
from thinwire.reducer import Reducer
from thinwire_lab.cluster.virtual import VirtualGroup, on_ranks
from thinwire_lab.machine import FIRST, TODAY, made
from thinwire_lab.problems import Problem, build
from thinwire_lab.problems.base import Batch, hits
from thinwire_lab.studies.convergence.last_writer import Whole, last_writer
from thinwire_lab.studies.convergence.optimizers import OPTIMIZERS, DelayedNesterov, Make, Schedule, scheduler

LOOKS = 15  # at the held-out loss, if not said otherwise
CIFAR10 = "cifar10/cifar10_jpeg.npz"
DATA = {"resnet20": CIFAR10, "vgg": CIFAR10, "lstm": "wikitext2", "mlp": "mnist"}
TEXT = "wikitext2/train.txt"
"""What the transformer trains on where the folder has it, in place of Python's standard library."""

_log = logging.getLogger(__name__)

_PARTS: Mapping[str, Any] = MappingProxyType(
    {
        name: getattr(package, name)
        for package in (codecs, exchanges, formats, memories, reducer, recipes, outer_steps)
        for name in package.__all__
    }
    | {"schedules": schedules, "torch": torch, "partial": partial, "last_writer": last_writer, "Whole": Whole}
    | {"DelayedNesterov": DelayedNesterov}
)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What decides a run. `batch`: samples per worker and step; None for the problem's own.

    scale: of the problem's size, where it has several.
    autocast: forward in bfloat16; parameters and optimizers stay float32.
    data: what of the folder of data the transformer trains on; empty for Python's standard library.
    elsewhere: the data on which accuracy is looked at, too; empty for none.
    warm_up: steps over which the learning rate rises to `rate`.
    recipe, optimizer: expressions, such as `topk(density=0.01)` or, for outer steps, `diloco(every=10)`, and
    `adamw(betas=(0.9, 0.99))`.
    """

    model: str
    recipe: str
    optimizer: str
    rate: float
    schedule: Schedule
    steps: int
    workers: int
    seed: int
    batch: int | None = None
    warm_up: int = 20
    device: str = "cpu"
    scale: float = 1.0
    autocast: bool = False
    data: str = ""
    elsewhere: str = ""

    def make_recipe(self) -> Reducer:
        return _evaluated(self.recipe, _PARTS, Reducer)

    def make_outer_steps(self) -> OuterSteps | None:
        """Return the outer steps that stand in the recipe's place, if they do."""
        made = _evaluated(self.recipe, _PARTS, object)
        return made if isinstance(made, OuterSteps) else None

    def make_optimizers(self, model: nn.Module) -> list[torch.optim.Optimizer]:
        make: Make = _evaluated(self.optimizer, OPTIMIZERS, Callable)
        return make(model, self.rate)


class Look(NamedTuple):
    """After `step` steps: the held-out loss, and the bits per parameter that a worker has sent by then.

    accuracy: the share of held-out targets that have the largest output; None where it was not looked at.
    elsewhere: the same on data of another kind.
    """

    step: int
    loss: float
    bits: float
    accuracy: float | None = None
    elsewhere: float | None = None


@dataclass(frozen=True, kw_only=True)
class Run:
    """What became of a run. `bits`: payload bytes · 8 / parameters, a mean over workers and steps.

    `seconds`: of a step of all workers together, held-out losses included. `thinwire`: the version that ran it, and
    `made`: when, and with which code, torch and processor. Early runs say neither.
    """

    settings: Settings
    looks: list[Look]
    seconds: float
    thinwire: str = TODAY
    made: Mapping[str, str] = field(default_factory=dict)

    @property
    def loss(self) -> float:
        return self.looks[-1].loss

    @property
    def bits(self) -> float:
        return self.looks[-1].bits / self.looks[-1].step

    def document(self) -> dict[str, Any]:
        found = {"looks": self.looks, "bits": self.bits, "seconds": self.seconds, "thinwire": self.thinwire}
        return asdict(self.settings) | found | dict(self.made)

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> "Run":
        settings = {name: document[name] for name in Settings.__dataclass_fields__ if name in document}
        looks = [Look(*look) for look in document["looks"]]
        by, made = document.get("thinwire", FIRST), {name: document[name] for name in _MADE if name in document}
        return cls(settings=Settings(**settings), looks=looks, seconds=document["seconds"], thinwire=by, made=made)


def problem_of(model: str, seed: int, data: Path | None, scale: float = 1.0) -> Problem:
    """Build the problem; its file lies in the folder `data`."""
    part = DATA.get(model) or text_of(model, data)
    return build(model, seed=seed, data=data / part if data is not None and part else None, scale=scale)


def text_of(model: str, data: Path | None) -> str:
    """Return `Settings.data`."""
    return TEXT if model == "transformer" and data is not None and (data / TEXT).exists() else ""


def train(settings: Settings, problem: Problem, every: int | None = None, other: Problem | None = None) -> Run:
    """Train from the problem's weights. `every`: steps between two looks at the held-out loss; `other`: `elsewhere`."""
    every = every or max(1, settings.steps // LOOKS)
    models = [copy.deepcopy(problem.model).to(settings.device) for _ in range(settings.workers)]
    turn, began = Lock(), time.perf_counter()
    logs = on_ranks(
        settings.workers, lambda group: _worker(settings, problem, other, models[group.rank()], every, group, turn)
    )
    seconds = (time.perf_counter() - began) / logs[0][-1].step
    bits = [sum(look.bits for look in looks) / len(looks) for looks in zip(*logs, strict=True)]
    looks = [look._replace(bits=mean) for look, mean in zip(logs[0], bits, strict=True)]
    return Run(settings=settings, looks=looks, seconds=seconds, made={name: made()[name] for name in _MADE})


_MADE = ("date", "code", "torch", "processor")


def _worker(
    settings: Settings,
    problem: Problem,
    other: Problem | None,
    model: nn.Module,
    every: int,
    group: VirtualGroup,
    turn: Lock,
) -> list[Look]:
    """Train one replica as a user would. It stops where the loss is not finite.

    Ranks take turns at their gradients: those that compute at the same time fight for caches, and none is done earlier.
    """
    optimizers = settings.make_optimizers(model)
    schedulers = [scheduler(optimizer, settings.schedule, settings.steps, settings.warm_up) for optimizer in optimizers]
    ties = _tied(settings, model, optimizers, group)
    numel, looks, began = sum(p.numel() for p in model.parameters()), list[Look](), time.perf_counter()
    for step in range(settings.steps):
        model.train()
        model.zero_grad(set_to_none=True)
        batch = _moved(batch_of(settings, problem, step, group.rank()), settings.device)
        with turn:
            with _precision(settings):
                loss = problem.loss(model, batch)
            loss.backward()
        ties.reduce()
        for optimizer, rates in zip(optimizers, schedulers, strict=True):
            optimizer.step()
            rates.step()
        done = step + 1
        if done % every == 0 or done == settings.steps:
            mean, accuracy = _held_out(problem, ties.model(), group, settings)
            elsewhere = _held_out(other, ties.model(), group, settings)[1] if other else None
            looks.append(Look(done, mean, 8 * group.payload_bytes / numel, accuracy, elsewhere))
            if group.rank() == 0:
                _log.info("step %d: loss %.4f, %.1f s", done, mean, time.perf_counter() - began)
            if not math.isfinite(looks[-1].loss):
                break
    return looks


class _Ties(NamedTuple):
    """What ties a worker to the others.

    `reduce` is called before an optimizer steps. `model`: what to look at; of outer steps, the global one.
    """

    reduce: Callable[[], None]
    model: Callable[[], nn.Module]


def _tied(settings: Settings, model: nn.Module, optimizers: list[torch.optim.Optimizer], group: VirtualGroup) -> _Ties:
    steps = settings.make_outer_steps()
    if steps is None:
        replicas = replicate(model, settings.make_recipe(), group=group, optimizer=optimizers)
        if torch.device(settings.device).type == "cuda":  # one bucket: threads share the host, and fewer launches count
            parameters = [p for bucket in replicas._buckets for p in bucket.parameters]
            replicas._buckets = list(buckets(parameters[::-1], 1 << 40))
        return _Ties(replicas.reduce, lambda: model)
    handle = outer(model, optimizers, steps, group=group)
    shown = copy.deepcopy(model)

    def look() -> nn.Module:
        shown.load_state_dict(model.state_dict())
        shown.load_state_dict(handle.parameters, strict=False)  # tied weights have one name here
        return shown

    return _Ties(lambda: None, look)


def batch_of(settings: Settings, problem: Problem, step: int, rank: int) -> Batch:
    """Return a worker's batch: the problem's own, or as many of its batches as make up the size, cut to it."""
    first = problem.batch(step, rank, settings.workers)
    if settings.batch is None:
        return first
    count = math.ceil(settings.batch / len(first[0]))
    batches = [problem.batch(step, rank + i * settings.workers, count * settings.workers) for i in range(count)]
    return tuple(torch.cat(parts)[: settings.batch] for parts in zip(*batches, strict=True))


@torch.no_grad()
def _held_out(problem: Problem, model: nn.Module, group: VirtualGroup, settings: Settings) -> tuple[float, float]:
    """Return the first rank's loss and accuracy on all held-out batches, to every rank."""
    means = torch.zeros(2, device=settings.device)
    if group.rank() == 0:
        model.eval()
        batches = [_moved(batch, settings.device) for batch in problem.held_out(0, 1)]
        with _precision(settings):
            means = torch.stack(
                [torch.stack([problem.loss(model, x), hits(model(*x[:-1]), x[-1]).float().mean()]) for x in batches]
            ).mean(dim=0)
    dist.broadcast(means, group=group, group_src=0)
    return float(means[0]), float(means[1])


def _moved(batch: Batch, device: str) -> Batch:
    if device == "cpu":
        return batch
    return tuple(part.pin_memory().to(device, non_blocking=True) for part in batch)  # else the host would wait


def _precision(settings: Settings) -> torch.autocast:
    return torch.autocast(torch.device(settings.device).type, torch.bfloat16, enabled=settings.autocast)


def _evaluated(text: str, known: Mapping[str, Any], kind: Any) -> Any:
    """Return what the expression makes of these names. Raises ValueError if that is not of its kind."""
    try:
        made = eval(text, {"__builtins__": {}}, dict(known))
    except Exception as error:
        raise ValueError(f"{text!r} is not an expression of {', '.join(known)}: {error}") from error
    if not isinstance(made, kind):
        raise ValueError(f"{text!r} is {made!r:.60}; expected a {kind.__name__}")
    return made

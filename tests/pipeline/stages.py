"""Split models and the schedules that run them; the functions at the end run on the ranks."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from cases import RECIPES
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from thinwire.integrations import Attachment
from thinwire.pipeline import Boundary, Sparsified, TopKBoundary, sparsify

MICRO, BATCH, WIDTH, CLASSES = 6, 12, 16, 5


def _turns(rank: int, world: int, per_rank: int) -> list[int]:
    return [rank + world * turn for turn in range(per_rank)]


def _v(rank: int, world: int, per_rank: int) -> list[int]:
    return [rank, 2 * world - 1 - rank]


@dataclass(frozen=True)
class Kind:
    """A schedule of torch's, how many stages a rank has, and which."""

    schedule: Any
    per_rank: int = 2
    place: Callable[[int, int, int], list[int]] = _turns
    last_first: bool = False
    """Whether gradients are added up from the last micro-batch on."""


KINDS = {
    "gpipe": Kind(pipelining.ScheduleGPipe, 1),
    "1f1b": Kind(pipelining.Schedule1F1B, 1),
    "looped bfs": Kind(pipelining.ScheduleLoopedBFS, last_first=True),
    "interleaved": Kind(pipelining.ScheduleInterleaved1F1B),
    "interleaved zero-bubble": Kind(pipelining.ScheduleInterleavedZeroBubble),
    "zbv": Kind(pipelining.ScheduleZBVZeroBubble, 2, _v),
    "dual pipe v": Kind(pipelining.ScheduleDualPipeV, 2, _v),
}


class One(nn.Module):
    """A part that takes one tensor and returns one."""

    def __init__(self, first: bool, last: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, CLASSES if last else WIDTH)
        self.last = last

    def forward(self, x: Tensor) -> Tensor:
        """Logits from the last part."""
        return self.linear(x) if self.last else self.linear(x).relu()


class Two(nn.Module):
    """A part that takes two tensors (the first part: one) and returns two."""

    def __init__(self, first: bool, last: bool) -> None:
        super().__init__()
        self.linear, self.skip = (nn.Linear(WIDTH, CLASSES if last else WIDTH) for _ in range(2))
        self.last = last

    def forward(self, x: Tensor, *skip: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Logits from the last part."""
        y, z = self.linear(x).tanh(), self.skip(skip[0] if skip else x)
        return y + z if self.last else (y, z)


class Named(Two):
    """The same with whole numbers too, which pass on as they are; torch tries shapes out with any numbers at all."""

    def __init__(self, first: bool, last: bool) -> None:
        super().__init__(first, last)
        self.names = nn.Embedding(7, WIDTH)

    def forward(self, x: Tensor, *rest: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Logits from the last part."""
        *skip, names = rest
        out = super().forward(x + self.names(names % 7), *skip)
        return out if isinstance(out, Tensor) else (*out, names)


MODELS: dict[str, Callable[[bool, bool], nn.Module]] = {"one": One, "two": Two, "named": Named}


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What to train, and how; without a density nothing is sparsified."""

    kind: str
    model: str = "one"
    density: float | None = None
    values: Any = None
    steps: int = 1
    boundary: Callable[[], Boundary] | None = None

    @property
    def sparse(self) -> bool:
        """Whether boundaries are wanted."""
        return self.density is not None or self.boundary is not None

    def boundaries(self, count: int) -> list[Boundary]:
        """As many as wanted."""
        if self.boundary is not None:
            return [self.boundary() for _ in range(count)]
        return [TopKBoundary(self.density or 1.0, values=self.values) for _ in range(count)]


@dataclass
class Outcome:
    """What came of training: per step, the outputs and losses; and the gradients of each stage's parameters."""

    outputs: list[Tensor] = field(default_factory=list)
    losses: list[list[Tensor]] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    extra: Any = None


def parts(name: str, count: int, seed: int = 0) -> list[nn.Module]:
    """Return a split model in order."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return [MODELS[name](i == 0, i == count - 1) for i in range(count)]


def batches(trial: Trial, replica: int = 0) -> Iterator[tuple[tuple[Tensor, ...], Tensor]]:
    """Yield the arguments of the first part, and the targets."""
    generator = torch.Generator().manual_seed(17 + replica)
    for _ in range(trial.steps):
        x = torch.randn(BATCH, WIDTH, generator=generator)
        names = torch.randint(0, 7, (BATCH,), generator=generator)
        targets = torch.randint(0, CLASSES, (BATCH,), generator=generator)
        yield ((x, names) if trial.model == "named" else (x,)), targets


def optimizer(modules: Sequence[nn.Module]) -> torch.optim.Optimizer:
    """Return what trains the modules."""
    return torch.optim.SGD([p for module in modules for p in module.parameters()], lr=0.2, momentum=0.9)


def gradients(modules: dict[int, nn.Module]) -> dict[str, Tensor]:
    """Return a copy of each parameter's gradient by stage and name."""
    return {
        f"{i}.{name}": torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for i, module in modules.items()
        for name, p in module.named_parameters()
    }


def unsplit(trial: Trial, count: int) -> Outcome:
    """Train the whole model here, one micro-batch after the other, with boundaries as modules between the parts."""
    modules, outcome = parts(trial.model, count), Outcome()
    between = trial.boundaries(count - 1) if trial.sparse else [nn.Identity() for _ in range(count - 1)]
    sgd = optimizer(modules)
    for args, targets in batches(trial):
        sgd.zero_grad()
        outputs, losses = [], []
        chunks = [arg.chunk(MICRO) for arg in (*args, targets)]
        for *inputs, target in zip(*chunks, strict=True):
            output = through(modules, between, tuple(inputs))
            losses.append(nn.functional.cross_entropy(output, target))
            outputs.append(output.detach())
        for loss in reversed(losses) if KINDS[trial.kind].last_first else losses:
            loss.backward()
        for module in modules:
            for parameter in module.parameters():
                if parameter.grad is not None:
                    parameter.grad.div_(MICRO)
        note(outcome, torch.cat(outputs), losses, dict(enumerate(modules)))
        sgd.step()
    return outcome


def through(modules: Sequence[nn.Module], between: Sequence[nn.Module], x: tuple[Tensor, ...]) -> Tensor:
    for module, boundary in zip(modules[:-1], between, strict=True):
        y = module(*x)
        x = tuple(boundary(z) if z.is_floating_point() else z for z in ((y,) if isinstance(y, Tensor) else y))
    return modules[-1](*x)


def note(outcome: Outcome, output: Tensor | None, losses: list[Tensor], modules: dict[int, nn.Module]) -> None:
    if output is not None:
        outcome.outputs.append(output.detach())
        outcome.losses.append([loss.detach() for loss in losses])
    outcome.gradients.append(gradients(modules))


@dataclass
class Pipeline:
    """This rank's stages and their schedule."""

    stages: list[PipelineStage]
    schedule: Any
    sparsified: Sparsified | None

    def step(self, args: tuple[Tensor, ...], targets: Tensor, train: bool = True) -> tuple[Tensor | None, list[Tensor]]:
        """Return the outputs and losses where the last stage is."""
        losses: list[Tensor] = []
        first, last = any(s.is_first for s in self.stages), any(s.is_last for s in self.stages)
        run = self.schedule.step if train else self.schedule.eval
        output = run(*(args if first else ()), **({"target": targets, "losses": losses} if last else {}))
        return output, losses


def pipeline(trial: Trial, group: Any = None, replicas: Any = None) -> Pipeline:
    """Build this rank's stages of the trial."""
    kind, rank, world = KINDS[trial.kind], dist.get_rank(group), dist.get_world_size(group)
    modules = parts(trial.model, kind.per_rank * world)
    if replicas is not None:
        modules = [DistributedDataParallel(module, process_group=replicas) for module in modules]
    stages = [
        PipelineStage(modules[i], i, len(modules), torch.device("cpu"), group=group)
        for i in kind.place(rank, world, kind.per_rank)
    ]
    sparsified = None
    if trial.boundary is not None:
        sparsified = sparsify(stages, boundary=trial.boundary)
    elif trial.density is not None:
        sparsified = sparsify(stages, trial.density, values=trial.values)
    return Pipeline(stages, scheduled(kind, stages), sparsified)


def scheduled(kind: Kind, stages: list[PipelineStage]) -> Any:
    """Return the schedule of these stages."""
    return kind.schedule(stages if kind.per_rank > 1 else stages[0], MICRO, nn.functional.cross_entropy)


def train(trial: Trial) -> Outcome:
    """Train this rank's stages."""
    run, outcome = pipeline(trial), Outcome()
    sgd = optimizer([stage.submod for stage in run.stages])
    for args, targets in batches(trial):
        sgd.zero_grad()
        output, losses = run.step(args, targets)
        note(outcome, output, losses, {stage.stage_index: stage.submod for stage in run.stages})
        sgd.step()
    return outcome


def both(trial: Trial) -> tuple[Outcome, Outcome]:
    """Return what this rank gets of the pipeline, and what the whole model gives without one."""
    return train(trial), unsplit(trial, KINDS[trial.kind].per_rank * dist.get_world_size())


def sparse_and_plain(trial: Trial) -> tuple[Outcome, Outcome]:
    """Return what this rank gets of the trial, and without boundaries."""
    return train(trial), train(replace(trial, density=None, boundary=None))


Hold = Callable[[Sequence[nn.Module], Any], tuple[Callable[[], object], list[Attachment]]]
"""Makes copies of a rank's stages over a group: what to call after each backward, and what can compare them."""


def by_replicate(recipe: str) -> Hold:
    """Hold stages by `replicate`."""

    def hold(modules: Sequence[nn.Module], group: Any) -> tuple[Callable[[], object], list[Attachment]]:
        replicas = tw.replicate(modules, RECIPES[recipe].make(), group=group)
        return replicas.reduce, [replicas.attachment]

    return hold


def by_ddp(recipe: str) -> Hold:
    """Hold stages that have DDP around them by `attach`."""

    def hold(modules: Sequence[nn.Module], group: Any) -> tuple[Callable[[], object], list[Attachment]]:
        attachments = [tw.attach(m, RECIPES[recipe].make()) for m in modules if isinstance(m, DistributedDataParallel)]
        return lambda: None, attachments

    return hold


def replicated(trial: Trial, hold: Hold, ddp: bool = False) -> tuple[list[Tensor], list[Tensor], bool]:
    """Train two copies of a pipeline of two ranks.

    Returns this rank's parameters, those of the whole model trained on both copies' batches, and whether copies agree.
    """
    pipes, copies = ([dist.new_group(ranks) for ranks in pairs] for pairs in (([0, 1], [2, 3]), ([0, 2], [1, 3])))
    replica, place = divmod(dist.get_rank(), 2)
    run = pipeline(trial, pipes[replica], copies[place] if ddp else None)
    modules = [stage.submod for stage in run.stages]
    reduce, attachments = hold(modules, copies[place])
    sgd = optimizer(modules)
    for batch in batches(trial, replica):
        sgd.zero_grad()
        run.step(*batch)
        reduce()
        sgd.step()
    whole = averaged(trial, 2 * KINDS[trial.kind].per_rank)
    expected = [p.detach() for stage in run.stages for p in whole[stage.stage_index].parameters()]
    alike = bool(attachments) and all(attachment.verify_replicas() for attachment in attachments)
    return [p.detach() for module in modules for p in module.parameters()], expected, alike


def averaged(trial: Trial, count: int) -> list[nn.Module]:
    """Train the whole model here on both copies' batches at once, without boundaries."""
    modules = parts(trial.model, count)
    sgd = optimizer(modules)
    for pair in zip(batches(trial, 0), batches(trial, 1), strict=True):
        sgd.zero_grad()
        for args, targets in pair:
            output = through(modules, [nn.Identity()] * (count - 1), args)
            (nn.functional.cross_entropy(output, targets) / len(pair)).backward()
        sgd.step()
    return modules

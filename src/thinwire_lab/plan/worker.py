"""What a worker process does for `thinwire plan`: measure a model, or with --pipeline its own stage of one."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thinwire.collectives import Group, all_gather_plain
from thinwire.integrations.momentum.families import family
from thinwire.integrations.replicas.profiling import budget_for, profile
from thinwire.integrations.sharding.fsdp import sharded_modules
from thinwire.planner import Budget, Profile
from thinwire_lab import problems
from thinwire_lab.cluster.worker import Emit
from thinwire_lab.cluster.workers import join_group, mesh, wrapped
from thinwire_lab.inputs import BadInput
from thinwire_lab.plan.crossings import probe_crossings
from thinwire_lab.plan.script import explained
from thinwire_lab.plan.subject import Subject, of_bench, of_user
from thinwire_lab.problems import Problem
from thinwire_lab.problems.base import Feed, Parts, check_stages, size
from thinwire_lab.problems.optimizers import optimizers, step_all

_SUBJECTS: Mapping[str, Callable[..., Subject]] = MappingProxyType({"bench": of_bench, "user": of_user})


def measure(job: dict[str, Any], emit: Emit) -> None:
    """Measure what `job` names. Emit the "profile", the same on all ranks, and its "budget", or why it is "refused"."""
    try:
        found, budget = _measured(job)
        emit({"profile": found.to_json(), "budget": asdict(budget)})
    except BadInput as error:
        emit({"refused": str(error)})


def _measured(job: dict[str, Any]) -> tuple[Profile, Budget]:
    subject = _SUBJECTS[job["kind"]](**job["subject"])
    if not any(p.requires_grad for p in subject.module.parameters()):
        raise BadInput(f"{subject.description}: no parameter takes a gradient, so there is nothing to exchange")
    if not dist.is_initialized():  # the user's code may have chosen a backend
        join_group()
    budget = _budget(Budget(**job["budget"]), subject, named=job["named"])
    found = (explained if job["explain"] else _planned)(subject, budget)
    return replace(found, made={**found.made, "model": subject.description}), budget


def _planned(subject: Subject, budget: Budget) -> Profile:
    """Measure a subject in DDP; a collective. Raises BadInput for a sharded one."""
    if sharded_modules(subject.module):
        raise BadInput(
            f"{subject.description}: fully_shard has sharded it, and a plan is for whole replicas: add --explain, "
            "which says what takes the time and what to change"
        )
    model = wrapped(subject.module)
    return profile(model, lambda: subject.loss(model), update=subject.update, budget=budget)


def _budget(given: Budget, subject: Subject, *, named: bool) -> Budget:
    """Return the budget for the subject's own optimizer, if the user named none. `named`: whether candidates were."""
    if given.optimizer is not None:
        return given
    if named:
        return replace(given, optimizer=family(subject.optimizers))
    return budget_for(given, subject.optimizers, [p for p in subject.module.parameters() if p.requires_grad])


class Micro(NamedTuple):
    """A stage's input for one micro-batch, and a function from its output to a loss or a stand-in for it."""

    args: tuple[Tensor, ...]
    kwargs: dict[str, Tensor]
    loss: Callable[[Tensor], Tensor]


def checked(subject: dict[str, Any], stages: int, micro_batches: int) -> Problem:
    """Build one of the bench's models. Raises BadInput as `problems.build` and `check_stages` do."""
    data = None if subject["data"] is None else Path(subject["data"])
    problem = problems.build(subject["name"], seed=subject["seed"], data=data, scale=subject["scale"])
    check_stages(problem, stages, micro_batches)
    return problem


def measure_stages(job: dict[str, Any], emit: Emit) -> None:
    """Measure each stage. Emit the "profiles" and the "crossings", alike on all ranks, or why it is "refused"."""
    try:
        emit(_measured_stages(**job))
    except BadInput as error:
        emit({"refused": str(error)})


def _measured_stages(
    subject: dict[str, Any], budget: dict[str, Any], stages: int, micro_batches: int, density: float
) -> dict[str, Any]:
    join_group()
    problem = checked(subject, stages, micro_batches)
    parts, everyone = cast(Parts, problem.parts), cast(Group, dist.group.WORLD)
    replicas, neighbours = (mesh(stages).get_group(name) for name in ("replica", "stage"))
    modules = parts.split(problem.model, stages)
    feeds = _micro_batches(parts.feed(problem.batch(0, replicas.rank(), replicas.size())), micro_batches)
    outputs = [_outputs(modules, feed) for feed in feeds]
    crossings = probe_crossings(outputs[0][:-1], neighbours, everyone, density=density, micro_batches=micro_batches)
    micros = _micros(feeds, outputs, neighbours.rank(), parts)
    several = optimizers(subject["optimizer"], modules[neighbours.rank()], problem)
    own = _profile(problem, modules[neighbours.rank()], several, micros, replicas, Budget(**budget))
    return {"crossings": asdict(crossings), "profiles": all_gather_plain(own.to_json(), neighbours)}


def _micro_batches(feed: Feed, count: int) -> list[Feed]:
    """Split a batch into micro-batches, as the schedule does."""
    args, kwargs, target = feed
    named = {name: x.chunk(count) for name, x in kwargs.items()}
    columns = list(zip(*(x.chunk(count) for x in args), strict=True))
    targets = target.chunk(count)
    return [(columns[i], {name: pieces[i] for name, pieces in named.items()}, targets[i]) for i in range(count)]


@torch.no_grad()
def _outputs(modules: Sequence[nn.Module], feed: Feed) -> list[Tensor]:
    """Return the output of each stage."""
    args, kwargs, _ = feed
    outputs = list[Tensor]()
    for module in modules:
        outputs.append(module(*args, **kwargs))
        args = (outputs[-1],)
    return outputs


def _micros(feeds: Sequence[Feed], outputs: Sequence[Sequence[Tensor]], index: int, parts: Parts) -> list[Micro]:
    """Return the inputs of that stage; unless it is the last, a random gradient stands in for the loss."""
    micros = list[Micro]()
    for (args, kwargs, target), made in zip(feeds, outputs, strict=True):
        loss = partial(lambda gradient, output: (output * gradient).sum(), torch.randn_like(made[index]))
        if index == len(made) - 1:
            loss = partial(lambda right, output: parts.criterion(output, right), target)
        micros.append(Micro(args if index == 0 else (made[index - 1].requires_grad_(),), kwargs, loss))
    return micros


def _profile(
    problem: Problem,
    stage: nn.Module,
    several: Sequence[torch.optim.Optimizer],
    micros: Sequence[Micro],
    replicas: Group,
    budget: Budget,
) -> Profile:
    """Measure a stage's gradients among its replicas; a single one needs no candidates."""
    model = wrapped(stage, group=replicas)
    found = profile(
        model,
        lambda: _step(model, micros),
        update=partial(step_all, several),
        budget=budget if replicas.size() > 1 else Budget(names=()),
    )
    return replace(found, made={**found.made, "model": f"{size(stage)} of: {problem.description}"})


def _step(model: nn.Module, micros: Sequence[Micro]) -> Tensor:
    """Run each micro-batch forward and back. The caller runs the last one's backward, for which DDP waits."""
    *others, last = micros
    for micro in others:
        _loss(model, micro).backward()
    return _loss(model, last)


def _loss(model: nn.Module, micro: Micro) -> Tensor:
    leaves = [x.detach().requires_grad_(x.requires_grad) for x in micro.args]  # their gradients are not added up
    return micro.loss(model(*leaves, **micro.kwargs))

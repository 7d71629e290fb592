"""What a worker process does for `thinwire plan`: measure a model."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from types import MappingProxyType
from typing import Any

import torch.distributed as dist

from thinwire.integrations.momentum.first_moments import family
from thinwire.integrations.replicas.profiling import budget_for, profile
from thinwire.integrations.sharding.fsdp import sharded_modules
from thinwire.planner import Budget, Profile
from thinwire_lab.cluster.worker import Emit
from thinwire_lab.cluster.workers import join_group, wrapped
from thinwire_lab.inputs import BadInput
from thinwire_lab.plan.script import explained
from thinwire_lab.plan.subject import Subject, of_bench, of_user

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

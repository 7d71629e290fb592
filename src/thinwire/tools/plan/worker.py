"""What a worker process does for `thinwire plan`: measure, on the group that all workers form."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch.distributed as dist

from thinwire.integrations.profiling import profile
from thinwire.planner import Budget, Profile
from thinwire.tools.cluster.serve import Emit
from thinwire.tools.cluster.workers import join_group, wrapped
from thinwire.tools.inputs import BadInput
from thinwire.tools.plan.subject import Subject, of_bench, of_user

_SUBJECTS: Mapping[str, Callable[..., Subject]] = MappingProxyType({"bench": of_bench, "user": of_user})


def handle(job: dict[str, Any], emit: Emit) -> None:
    """Measure what `job` names and emit the "profile", which is the same on all ranks, or why it is "refused"."""
    try:
        emit({"profile": _measured(job).to_json()})
    except BadInput as error:
        emit({"refused": str(error)})


def _measured(job: dict[str, Any]) -> Profile:
    subject = _SUBJECTS[job["kind"]](**job["subject"])
    if not any(p.requires_grad for p in subject.module.parameters()):
        raise BadInput(f"{subject.description}: no parameter takes a gradient, so there is nothing to exchange")
    if not dist.is_initialized():  # a model of the user's may have chosen a backend
        join_group()
    model = wrapped(subject.module)
    found = profile(model, lambda: subject.loss(model), update=subject.update, budget=Budget(**job["budget"]))
    return replace(found, made={**found.made, "model": subject.description})

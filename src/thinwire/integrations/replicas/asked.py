"""What was `attach` asked for, and of what? A recipe, a plan or a budget, for the parameters that DDP reduces."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel

from thinwire.collectives import Group
from thinwire.planner.candidates import Budget, OptimizerName
from thinwire.planner.live import Adaptive
from thinwire.planner.plan import Plan, Why
from thinwire.reducer import Reducer

_log = logging.getLogger("thinwire")

Asked = Reducer | Plan | Budget


def ranks_among(given: Mapping[str, object]) -> list[Group]:
    """Return the group of the DDP model that is among a function's arguments; none if there is none."""
    model = given.get("model")
    return [model.process_group] if isinstance(model, DistributedDataParallel) else []


def asked_for(how: object, optimizer: OptimizerName | None) -> Asked:
    """Return the recipe, plan or budget asked for: "auto" is the budget for this optimizer. Raises TypeError."""
    if isinstance(how, Budget):
        return replace(how, optimizer=how.optimizer or optimizer)
    if isinstance(how, str) and how == "auto":  # arrays compare element by element
        return Budget.under(optimizer)
    if not isinstance(how, Reducer | Plan):
        raise TypeError(
            "attach takes a recipe such as recipes.topk(density=0.01), a plan from thinwire.plan, a Budget, or "
            f'"auto"; got {how!r:.60}'
        )
    return how


def online_budget(budget: Budget, group: Group, *, has_momentum: bool) -> Budget:
    """Return the budget of what can be switched on and off in training, and log what is left out, and why."""
    if budget == Budget() and group.rank() == 0:
        _say_that_none_is_known()
    budget = _leaving_out(budget, budget.switchable(), _NOT_IN_TRAINING, group)
    return budget if has_momentum else _leaving_out(budget, budget.without_momentum(), _NONE_TO_TAKE_FROM, group)


def chosen(
    asked: Asked, dense: Mapping[str, nn.Parameter], ranks: int, caps: list[int] | None
) -> tuple[Reducer, Callable[[], Why] | None]:
    """Return the reducer for these gradients, and what says why, unless you chose it.

    Raises ValueError for the plan of another model, or of another number of ranks.
    """
    if isinstance(asked, Reducer):
        return asked, None
    if isinstance(asked, Budget):
        adaptive = Adaptive(asked, sizes=[p.numel() for p in dense.values()], caps=caps)
        return adaptive, adaptive.why
    there = {row.name: f"{row.numel} elements in {row.dense_bytes} bytes" for row in asked.rows}
    here = {name: f"{p.numel()} elements in {p.nbytes} bytes" for name, p in dense.items()}
    for name in sorted(there.keys() | here.keys()):
        if (other := there.get(name, "no gradient")) != (mine := here.get(name, "no gradient")):
            raise ValueError(f"the plan is for another model, where {name} has {other}; here it has {mine}: plan anew")
    if asked.profile.world_size != ranks:
        raise ValueError(
            f"the plan is for {asked.profile.world_size} ranks; here are {ranks}: plan with them, or from a saved "
            f"profile by decide(profile.on(world_size={ranks}))"
        )
    return asked.reducer(), asked.why


_NONE_TO_TAKE_FROM = (
    "it takes momentum out of the optimizer: pass attach(..., optimizer=) one with momentum, such as AdamW, that holds "
    "the whole model"
)
_NOT_IN_TRAINING = (
    "its updates are much larger than gradients, and an optimizer cannot switch between the two during training: "
    "attach its recipe, or a plan made beforehand by thinwire.plan"
)


@cache  # once in a process
def _say_that_none_is_known() -> None:
    _log.warning(
        'attach(model, "auto") does not know the optimizer, on which the loss of each method depends, and may choose '
        "sparsification: pass attach(..., optimizer=optimizer), or a Budget"
    )


def _leaving_out(budget: Budget, less: Budget, why: str, group: Group) -> Budget:
    """Say what the smaller budget leaves out, and why, and return it."""
    level = logging.DEBUG if group.rank() else logging.INFO
    for name in budget.names:
        if name not in less.names:
            _log.log(level, "%s is left out, as %s", name, why)
    return less


_FIRST_BYTES = 1 << 20  # of the first bucket where bucket_cap_mb is left to DDP


def managed(model: DistributedDataParallel) -> dict[str, nn.Parameter]:
    """Return the parameters that DDP reduces; RuntimeError if they have changed since, TypeError if complex."""
    names: dict[nn.Parameter, str] = {}
    for prefix, module in model.module.named_modules():
        for name, p in module.named_parameters(recurse=False):
            if p.requires_grad and f"{prefix}.{name}" not in model.parameters_to_ignore:
                names.setdefault(p, f"{prefix}.{name}".removeprefix("."))
    if len(names) != model._get_ddp_logging_data()["num_parameter_tensors"]:
        raise RuntimeError("requires_grad has changed since the module was wrapped in DDP: wrap it again")
    if complex_ := [name for p, name in names.items() if p.is_complex()]:
        raise TypeError(
            f"{complex_[0]} is complex, and DDP's hooks see only half of its gradient: keep it as torch.view_as_real"
        )
    return {name: p for p, name in names.items()}


def kept_alike(model: DistributedDataParallel) -> Callable[[], dict[str, torch.Tensor]]:
    """Return what lists the parameters, and the buffers that DDP sends to all ranks but running statistics."""
    module, ignored, sent = model.module, set(model.parameters_to_ignore), model.broadcast_buffers

    def everything() -> dict[str, torch.Tensor]:
        own = {x for m in module.modules() if isinstance(m, _NormBase) for x in m.buffers(recurse=False)}
        buffers = [(name, x) for name, x in module.named_buffers() if sent and x not in own]
        return {name: x for name, x in (*module.named_parameters(), *buffers) if name not in ignored}

    return everything


def sparse_weights(module: nn.Module) -> set[torch.Tensor]:
    """Return the weights of the module's sparse embeddings, whose gradients are sparse."""
    embeddings = (m for m in module.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag))
    return {m.weight for m in embeddings if m.sparse}


def bucket_caps(model: DistributedDataParallel) -> list[int]:
    """How many bytes fill DDP's first bucket, and how many each later one?"""
    other = int(model.bucket_bytes_cap)
    return [_FIRST_BYTES if getattr(model, "bucket_bytes_cap_default", False) else other, other]

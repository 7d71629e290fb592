"""Attaching to DistributedDataParallel: its hook, and its Join for uneven inputs."""

import logging
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Annotated, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.checked import BODY, Count, checked
from thinwire.collectives import Group
from thinwire.integrations.attachments.assembly import (
    ASSEMBLY_ERRORS,
    Optimizers,
    assembled,
    check_free,
    check_takeover,
    listed,
)
from thinwire.integrations.attachments.attachment import Attachment, LossScaler
from thinwire.integrations.membership.membership import Divisor
from thinwire.integrations.membership.together import agreed
from thinwire.integrations.momentum.families import family
from thinwire.integrations.momentum.first_moments import movable
from thinwire.integrations.replicas.agreement import compare_before_buffers
from thinwire.integrations.replicas.managed import bucket_caps, managed, sparse_weights
from thinwire.integrations.replicas.plain_steps import PlainSteps
from thinwire.integrations.sharding.fsdp import refuse_sharded
from thinwire.integrations.training.drift import rebroadcast_every
from thinwire.planner.candidates import Budget
from thinwire.planner.live import Adaptive
from thinwire.planner.losses import OptimizerName
from thinwire.planner.plan import Plan, Why
from thinwire.reducer import Reducer

_log = logging.getLogger("thinwire")


@checked
def attach(
    model: Annotated[DistributedDataParallel, BODY],
    recipe: Annotated[Reducer | None, BODY] = None,
    *,
    plan: Annotated[Literal["auto"] | Budget | Plan | None, BODY] = None,
    optimizer: Optimizers = None,
    scaler: LossScaler | None = None,
    rebroadcast: Count | None = None,
) -> Attachment:
    """Let `recipe` exchange the gradients of a DDP model, overlapping with backward as DDP does. A collective.

    `plan`, in place of a recipe: "auto" (also the default, if you give neither) measures the links, plans within
    `Budget.under` of your optimizer or within the budget you pass, races the plan against uncompressed steps, and plans
    again when the links change. `fading` is among the candidates only if momentum can be moved out of your optimizers;
    it then moves into the memory and back as the plan changes. `orthogonal` never is, as it cannot be taken up in the
    middle of training. A plan from `thinwire.plan` is used as it is, and may have either. Where
    nothing pays, DDP stays plain, without a hook. `why()` of what this returns says why each tensor is sent as it is.
    `optimizer`: one or several. The recipe takes momentum out of these if it applies momentum itself: out of SGD if it
    corrects momentum; out of Adam, AdamW, RAdam, Adamax, Muon or SGD if its momentum fades. "auto" wants to know them
    because what a method costs in loss depends on them, and `fading` needs them.
    `scaler`: the GradScaler you use, if any. What waits in memory then follows its loss scale.
    `rebroadcast`: send rank 0's parameters to all ranks after every so many steps (Wang et al. 2020, §4, take 10).
    The replicas are bit-identical without it; it repairs drift that something else has caused.

    An attachment takes over what waits in an earlier one to the same parameters, for example after you wrap the module
    in DDP anew.

    Raises TypeError for a model that is not DDP, for both a recipe and a plan, or for something that is neither;
    ValueError for a plan of another model or a `rebroadcast` below 1; FingerprintError where ranks disagree;
    MomentumError where momentum would be applied twice or not at all; and RuntimeError where the model has a hook
    already, or where something waits in an earlier attachment that this recipe cannot keep.
    """
    groups = [model.process_group] if isinstance(model, DistributedDataParallel) else []
    found = agreed(groups, lambda: _looked_at(model, recipe, plan, optimizer), *_REFUSALS)
    ddp = f"find_unused_parameters={model.find_unused_parameters}, static_graph={model.static_graph}"

    def put_together() -> Attachment:
        return assembled(
            found.recipe,
            found.parameters,
            found.names,
            model.process_group,
            settings=f"{ddp}, rebroadcast={rebroadcast}",
            optimizers=found.optimizers,
            scaler=scaler,
            divisor=_active_ranks(model, all_of_them=rebroadcast is not None),
            may_be_unused=found.may_be_unused,
            why=found.why,
        )

    attachment = agreed(groups, put_together, *ASSEMBLY_ERRORS, undo=Attachment.end)
    if isinstance(found.recipe, Adaptive) and found.names and not found.may_be_unused and rebroadcast is None:
        dense = {name: p for p, name in found.names.items()}
        PlainSteps(model, dense, attachment, found.recipe, install)
    elif found.pays or rebroadcast is not None:
        install(model, attachment)
    compare_before_buffers(model, attachment.membership)
    _attached.add(model)
    if rebroadcast is not None:
        rebroadcast_every(rebroadcast, attachment.steps, model.process_group)
    return attachment


def install(model: DistributedDataParallel, attachment: Attachment) -> None:
    """Make DDP hand its buckets to the attachment from now on."""
    model.register_comm_hook(attachment, _hook)


_Asked = Reducer | Plan | Budget
_REFUSALS = (TypeError, ValueError, RuntimeError)


class _Found(NamedTuple):
    """What one rank finds before ranks compare anything. `names`: of the parameters with dense gradients."""

    recipe: Reducer
    why: Callable[[], Why] | None
    pays: bool
    parameters: dict[str, nn.Parameter]
    names: dict[nn.Parameter, str]
    optimizers: list[torch.optim.Optimizer]
    may_be_unused: bool


def _looked_at(model: DistributedDataParallel, recipe: object, plan: object, optimizer: Optimizers) -> _Found:
    """Return what was asked for and of what. Raises what `attach` does about this rank alone."""
    optimizers = listed(optimizer)
    asked = _asked(recipe, plan, family(optimizers))
    _check(model, asked)
    parameters, sparse = managed(model), sparse_weights(model.module)
    if asked == Budget() and model.process_group.rank() == 0:
        _say_that_none_is_known()
    names = {p: name for name, p in parameters.items() if p not in sparse}
    may_be_unused = model.find_unused_parameters or model.static_graph
    if isinstance(asked, Budget):
        asked = _leaving_out(asked, asked.switchable(), _NOT_IN_TRAINING, model.process_group)
        if not (optimizers and movable(optimizers, names)):
            asked = _leaving_out(asked, asked.without_momentum(), _NONE_TO_TAKE_FROM, model.process_group)
    reducer, why = _chosen(asked, parameters, sparse, None if may_be_unused else bucket_caps(model))
    check_takeover(reducer, parameters)
    pays = not isinstance(asked, Plan) or asked.pays
    return _Found(reducer, why, pays, parameters, names, optimizers, may_be_unused)


def _asked(recipe: object, plan: object, optimizer: OptimizerName | None) -> _Asked:
    """Return the recipe, plan or budget that was asked for. By default that is what this optimizer bears."""
    if recipe is not None and plan is not None:
        raise TypeError("attach takes a recipe or a plan, not both; leave one of them out")
    if isinstance(recipe, Plan | Budget) or _is_auto(recipe):
        raise TypeError(f"attach takes {type(recipe).__name__} {recipe!r:.60} as plan=, not as the recipe")
    if recipe is not None and not isinstance(recipe, Reducer):
        raise TypeError(f"attach takes a recipe such as recipes.topk(density=0.01); got {recipe!r}")
    if not (plan is None or _is_auto(plan) or isinstance(plan, Plan | Budget)):
        raise TypeError(f'attach takes "auto", a Budget, or a plan from thinwire.plan as plan=; got {plan!r}')
    if isinstance(plan, Budget):
        return replace(plan, optimizer=plan.optimizer or optimizer)
    return recipe or (plan if isinstance(plan, Plan) else Budget.under(optimizer))


@cache  # once in a process
def _say_that_none_is_known() -> None:
    _log.warning(
        'plan="auto" was given no optimizer that it has figures for, and what a method costs in loss depends on it: '
        "pass attach(..., optimizer=optimizer), or a Budget; as it is, sparsification may be chosen too"
    )


def _leaving_out(budget: Budget, less: Budget, why: str, group: Group) -> Budget:
    """Say what the smaller budget leaves out, and why, and return it."""
    level = logging.DEBUG if group.rank() else logging.INFO
    for name in budget.names if less != budget else ():
        if name not in less.names:
            _log.log(level, "%s is left out, as %s", name, why)
    return less


_NONE_TO_TAKE_FROM = (
    "it takes momentum out of the optimizer: pass attach(..., optimizer=) AdamW, or another that has momentum to move, "
    "of the whole model"
)
_NOT_IN_TRAINING = (
    "what it delivers is not as long as gradients are, and an optimizer cannot change between the two while it trains: "
    "attach its recipe, or a plan that thinwire.plan has made beforehand"
)


def _is_auto(asked: object) -> bool:
    return isinstance(asked, str) and asked == "auto"  # arrays compare element by element


def _chosen(
    asked: _Asked, parameters: Mapping[str, nn.Parameter], sparse: set[torch.Tensor], caps: list[int] | None
) -> tuple[Reducer, Callable[[], Why] | None]:
    """Return the reducer, and the function that says why it does what it does, unless you chose it yourself."""
    if isinstance(asked, Reducer):
        return asked, None
    if isinstance(asked, Budget):
        adaptive = Adaptive(asked, sizes=[p.numel() for p in parameters.values() if p not in sparse], caps=caps)
        return adaptive, adaptive.why
    if strangers := sorted(asked.choice.keys() - parameters.keys()):
        raise ValueError(f"the plan has a tensor {strangers[0]!r}, which this model lacks: make a plan of this model")
    return asked.reducer(), asked.why


def _check(model: object, asked: _Asked) -> None:
    if not isinstance(model, DistributedDataParallel):
        refuse_sharded(model, "attach")
        raise TypeError(
            f"attach takes a DistributedDataParallel model; got {type(model).__name__}: wrap it in DDP first"
        )
    if model.mixed_precision is not None:
        raise RuntimeError("DDP's mixed_precision uses the only hook DDP has; use torch.autocast instead")
    if model._get_ddp_logging_data().get("comm_hook") or model in _attached:
        raise RuntimeError(
            "this model has a communication hook already, and DDP allows one: wrap the module in DDP anew"
        )
    if isinstance(asked, Reducer):
        check_free(asked)


_attached: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()


def _active_ranks(model: DistributedDataParallel, *, all_of_them: bool) -> Divisor:
    """Return the function that counts ranks. Within Join it may count only those with data, by a collective.

    With `all_of_them`, Join is refused.
    """
    held = weakref.ref(model)

    def divisor(joined: bool, continues: bool) -> int:
        model = held()
        assert model is not None  # its hook is what calls
        if not model._join_config.enable:
            return model.process_group.size()
        _check_join(joined, continues, all_of_them)
        if model._divide_by_initial_world_size:
            return model.process_group.size()
        active = torch.tensor([0 if joined else 1], device=next(model.parameters()).device)
        dist.all_reduce(active, group=model.process_group)
        return int(active)

    return divisor


def _check_join(joined: bool, continues: bool, all_of_them: bool) -> None:
    if all_of_them:
        raise RuntimeError(
            "rebroadcast= and Join do not go together, as ranks that have joined take no steps: leave out either"
        )
    if continues and not joined:
        raise RuntimeError(
            "within Join a rank that has joined cannot know that gradients accumulate: use model.no_sync() for all but "
            "the last backward of a step"
        )


# DDP inspects this signature: a plain function whose second argument is called bucket.
def _hook(
    attachment: Attachment,
    bucket: dist.GradBucket,  # type: ignore[name-defined]  # a C++ class that torch's stubs leave out
) -> torch.futures.Future[torch.Tensor]:
    flat = bucket.buffer()
    # Within Join, a rank without data follows the others outside of backward: nothing is added to any gradient.
    joined = not attachment.steps.gradients.added and not attachment.steps.begun
    if flat.is_sparse:
        return attachment.reduce_sparse(flat, bucket.parameters(), joined=joined)
    return attachment.reduce(flat, bucket.parameters(), bucket.gradients(), joined=joined)

"""Attaching to DistributedDataParallel: its hook, and its Join for uneven inputs."""

import weakref
from collections.abc import Callable
from typing import Annotated, Any, Literal, NamedTuple, final

import torch
import torch.distributed as dist
from torch import nn
from torch._compile import _disable_dynamo as untraced
from torch.nn.parallel import DistributedDataParallel

from thinwire.checked import BODY, Count, checked
from thinwire.integrations.attachments import assembly
from thinwire.integrations.attachments.assembly import Optimizers
from thinwire.integrations.attachments.attachment import Attachment, LossScaler
from thinwire.integrations.membership.membership import Divisor, Membership, agreed, raise_on_all
from thinwire.integrations.membership.state import words
from thinwire.integrations.momentum.first_moments import family, movable
from thinwire.integrations.replicas.asked import (
    Asked,
    asked_for,
    bucket_caps,
    chosen,
    kept_alike,
    managed,
    online_budget,
    ranks_among,
    sparse_weights,
)
from thinwire.integrations.replicas.plain_steps import PlainSteps
from thinwire.integrations.sharding.fsdp import refuse_sharded
from thinwire.integrations.training.optimizers import Hook
from thinwire.integrations.training.steps import Steps
from thinwire.planner.candidates import Budget
from thinwire.planner.live import Adaptive
from thinwire.planner.plan import Plan, Why
from thinwire.reducer import Reducer


@checked(on_error=raise_on_all(ranks_among))
def attach(
    model: Annotated[DistributedDataParallel, BODY],
    how: Annotated[Reducer | Plan | Budget | Literal["auto"], BODY],
    *,
    optimizer: Optimizers = None,
    scaler: LossScaler | None = None,
    samples: Count | None = None,
) -> Attachment:
    """Exchange the gradients of a DDP model by a recipe, overlapping with backward as DDP does; a collective.

    An attachment takes over the residuals of an earlier one to the same parameters, for example after you wrap the
    module in DDP again.

    Args:
        model: In DistributedDataParallel.
        how: A recipe, a plan from `thinwire.plan`, "auto" or a `Budget`. "auto" measures the links, plans within
            `Budget.under` of your optimizer, races the plan against uncompressed steps, and plans again when the links
            change. With a `Budget` it does the same within that. Both consider `fading` only if momentum can be moved
            out of your optimizers; it then moves into the memory and back as the plan changes. They never choose
            `orthogonal`, because it cannot be switched on during training. A plan may choose it. If nothing pays, DDP
            stays plain, without a hook.
        optimizer: One or several. A recipe that applies momentum itself takes it out of these: `dgc` and `dragonn` out
            of SGD; `fading`, `demo` and `orthogonal` out of Adam, AdamW, RAdam, Adamax, Muon or SGD. "auto" needs them
            to choose, because a method's cost in loss depends on the optimizer.
        scaler: The GradScaler you use, if any. Residuals then follow its loss scale.
        samples: How many samples this rank's gradients come from, if ranks differ: means are then weighted by it. Give
            it on every rank. Before the backward of a batch of another size, set the handle's `samples`.

    Returns:
        The handle, whose `why()` says why each tensor is sent as it is.

    Raises:
        TypeError: For a model that is not in DDP, for complex parameters (DDP's hooks see half of their gradients), and
            for anything but a recipe, plan, budget or "auto".
        ValueError: For a plan of another model, or of another number of ranks.
        FingerprintError: Where ranks disagree.
        MomentumError: Where momentum would be applied twice or not at all.
        RuntimeError: Where the model has a hook already, or an earlier attachment has residuals that this recipe cannot
            keep.

    Example:
        >>> model = DistributedDataParallel(nn.Linear(64, 64))
        >>> handle = tw.attach(model, tw.recipes.topk(density=0.01))
        >>> model(torch.ones(1, 64)).sum().backward()
    """
    groups = ranks_among({"model": model})
    found = agreed(groups, lambda: _looked_at(model, how, optimizer, samples))
    ddp = f"find_unused_parameters={model.find_unused_parameters}, static_graph={model.static_graph}"
    attachment = assembly.assembled(
        groups,
        found.recipe,
        found.parameters,
        settings=f"{ddp}, samples {'not given' if samples is None else 'given'}",
        optimizers=found.optimizers,
        sparse=found.sparse,
        scaler=scaler,
        divisor=_active_ranks(model),
        may_be_unused=found.may_be_unused,
        everything=kept_alike(model),
        why=found.why,
    )
    with assembly.opening(attachment):
        attachment.membership.samples = samples
        _set_to_work(model, found, attachment)
    return attachment


def install(model: DistributedDataParallel, attachment: Attachment) -> None:
    """Make DDP hand its buckets to the attachment from now on."""
    attachment.exchanges = True
    model.register_comm_hook(attachment, _hook)


class _Found(NamedTuple):
    """What one rank finds before ranks compare anything."""

    recipe: Reducer
    why: Callable[[], Why] | None
    pays: bool
    parameters: dict[str, nn.Parameter]
    sparse: set[torch.Tensor]
    optimizers: list[torch.optim.Optimizer]
    may_be_unused: bool


def _looked_at(model: DistributedDataParallel, how: object, optimizer: Optimizers, samples: int | None) -> _Found:
    """Return what was asked for and of what. Raises what `attach` does about this rank alone."""
    optimizers = assembly.listed(optimizer)
    asked = asked_for(how, family(optimizers))
    _check(model, asked)
    parameters, sparse = managed(model), sparse_weights(model.module)
    may_be_unused = model.find_unused_parameters or model.static_graph
    if isinstance(asked, Budget):
        has_momentum = bool(optimizers) and movable(optimizers, {*parameters.values()} - sparse)
        asked = online_budget(asked, model.process_group, has_momentum=has_momentum)
    dense = {name: p for name, p in parameters.items() if p not in sparse}
    reducer, why = chosen(asked, dense, model.process_group.size(), None if may_be_unused else bucket_caps(model))
    if samples is not None and not all(memory.keeps_length for memory in reducer.memories()):
        raise ValueError(f"{words(reducer):.60} discards the size of gradients, so samples= cannot weight them")
    assembly.check_takeover(reducer, parameters)
    pays = not isinstance(asked, Plan) or asked.pays
    return _Found(reducer, why, pays, parameters, sparse, optimizers, may_be_unused)


def _set_to_work(model: DistributedDataParallel, found: _Found, attachment: Attachment) -> None:
    """Have DDP hand its buckets to the attachment, or stay without a hook as long as nothing pays."""
    attachment.serve(model.module)
    weighed = attachment.samples is not None  # DDP itself does not
    dense = {name: p for name, p in found.parameters.items() if p not in found.sparse}
    if isinstance(found.recipe, Adaptive) and dense and not found.may_be_unused and not weighed:
        PlainSteps(model, dense, attachment, found.recipe, install)
    elif found.pays or weighed:
        install(model, attachment)
    else:
        attachment.exchanges = False
    compare_before_buffers(model, attachment.membership)
    _attached.add(model)


def _check(model: object, asked: Asked) -> None:
    if not isinstance(model, DistributedDataParallel):
        refuse_sharded(model, "attach")
        raise TypeError(
            f"attach takes a DistributedDataParallel model; got {type(model).__name__}: wrap it in DDP first, and call "
            "torch.compile after attach"
        )
    if model.mixed_precision is not None:
        raise RuntimeError("DDP's mixed_precision uses the only hook DDP has; use torch.autocast instead")
    if getattr(model, "_use_python_reducer", False):
        raise RuntimeError(
            'with torch._dynamo.config.optimize_ddp = "python_reducer", DDP hands no buckets to hooks: set it to True '
            "before you wrap the module in DDP"
        )
    if model._get_ddp_logging_data().get("comm_hook") or model in _attached:
        raise RuntimeError(
            "this model has a communication hook already, and DDP allows one: wrap the module in DDP again"
        )
    if isinstance(asked, Reducer):
        assembly.check_free(asked)


_attached: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()


def _active_ranks(model: DistributedDataParallel) -> Divisor:
    """Return what counts ranks; within Join, those without data learn what others did."""
    held = weakref.ref(model)

    def divisor(joined: bool, steps: Steps) -> int:
        model = held()
        assert model is not None  # its hook is what calls
        if not model._join_config.enable:
            return model.process_group.size()
        told = torch.tensor([not joined, *steps.settled()], dtype=torch.int32, device=next(model.parameters()).device)
        dist.all_reduce(told, group=model.process_group)
        active, *settled = told.tolist()
        steps.follow(settled)
        return model.process_group.size() if model._divide_by_initial_world_size else active

    return divisor


# DDP inspects this signature: a plain function whose second argument is called bucket. A whole step may be compiled,
# and this must not: `torch.compiler.disable` would do the same, and have every import of ours take Dynamo along.
@untraced
def _hook(
    attachment: Attachment,
    bucket: dist.GradBucket,  # type: ignore[name-defined]  # a C++ class that torch's stubs leave out
) -> torch.futures.Future[torch.Tensor]:
    flat = bucket.buffer()
    joined = torch._C._current_graph_task_id() < 0  # within Join, a rank without data takes part outside of backward
    if flat.is_sparse:
        return attachment.reduce_sparse(flat, bucket.parameters(), joined=joined)
    return attachment.reduce(flat, bucket.parameters(), joined=joined)


def compare_before_buffers(model: DistributedDataParallel, membership: Membership) -> None:
    """Have ranks compare where they stand before the first forward pass in training, if DDP sends buffers there.

    A rank may not have loaded what the others have. The first reduction finds that out, but DDP sends buffers in the
    forward pass before it. That would meet the comparison of the ranks that load, and hang.
    """
    if model.broadcast_buffers and model.modules_buffers:
        hook = _BeforeForward(membership)
        hook.handle = model.register_forward_pre_hook(hook)


@final
class _BeforeForward:
    """Compares once before training: an evaluation may be one rank's alone, and in Join some have no data."""

    handle: Any

    def __init__(self, membership: Membership) -> None:
        self._membership = weakref.ref(membership)
        self._put_off = False

    @untraced  # which must not trace a collective
    def __call__(self, model: nn.Module, inputs: object) -> None:
        assert isinstance(model, DistributedDataParallel)
        membership = self._membership()
        if membership is None or membership.agreed:
            self.handle.remove()
        elif not model._join_config.enable:
            if not (model.training and torch.is_grad_enabled()):
                self._put_off |= model.require_forward_param_sync
                model.require_forward_param_sync = False
                return
            membership.agree()
        if self._put_off:
            model.require_forward_param_sync, self._put_off = True, False

    def __reduce__(self) -> tuple[Any, ...]:
        """Stay behind when the model is copied or saved, as DDP's own hook does."""
        return Hook, ()

"""DistributedDataParallel."""

import weakref

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.integrations.attachment import Attachment, LossScaler
from thinwire.integrations.fingerprint import check_fingerprint
from thinwire.integrations.momentum import corrections, refuse_twice, take_over
from thinwire.integrations.rebroadcast import broadcast_every
from thinwire.reducer import Reducer

_SAMPLE = 1 << 12


def attach(
    model: DistributedDataParallel,
    recipe: Reducer,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    scaler: LossScaler | None = None,
    rebroadcast: int | None = None,
) -> Attachment:
    """Let `recipe` exchange the gradients of a DDP model, overlapping with backward as DDP does. A collective.

    `optimizer`: recipes with momentum correction take momentum, its buffers and weight decay over from this SGD.
    `scaler`: the GradScaler in use, if any; what waits in memory then follows its loss scale.
    `rebroadcast`: send rank 0's parameters to all before every so many steps (Wang et al. 2020, §4, take 10). The
    replicas of these recipes are bit-identical without; it mends what else has made them drift.

    Raises TypeError for anything but DDP or a recipe, ValueError for a `rebroadcast` below 1, FingerprintError where
    ranks disagree, MomentumError where momentum would be applied twice or not at all, and RuntimeError where the
    model's hook is taken.
    """
    _check(model, recipe)
    if rebroadcast is not None and rebroadcast < 1:
        raise ValueError(f"rebroadcast is {rebroadcast}; expected every how many steps, 1 or more, or None for never")
    parameters = _managed(model)
    group = model.process_group
    sparse = _with_sparse_gradients(model)
    names = {p: name for name, p in parameters.items() if p not in sparse}
    check_fingerprint(recipe, parameters, group, f"{_settings(model, optimizer)}, rebroadcast={rebroadcast}")
    kinds = {(p.dtype, p.device) for p in parameters.values()}
    recipe.prepare(group, [torch.ones(_SAMPLE, dtype=dtype, device=device) for dtype, device in kinds])
    decay = take_over(recipe.memories(), optimizer, names, group.size())
    attachment = Attachment(
        recipe,
        parameters,
        group,
        decay=decay,
        scaler=scaler,
        may_be_unused=model.find_unused_parameters or model.static_graph,
    )
    model.register_comm_hook(attachment, _hook)
    _serving.update({id(memory): attachment for memory in recipe.memories() if memory.stateful})
    if corrections(recipe.memories()):
        refuse_twice(attachment, names)
    if rebroadcast is not None:
        broadcast_every(rebroadcast, model, attachment)
    return attachment


def _check(model: object, recipe: object) -> None:
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(
            f"attach takes a DistributedDataParallel model; got {type(model).__name__}: wrap it in DDP first"
        )
    if not isinstance(recipe, Reducer):
        raise TypeError(f"attach takes a recipe such as recipes.topk(density=0.01); got {recipe!r}")
    if model.mixed_precision is not None:
        raise RuntimeError("DDP's mixed_precision uses the only hook DDP has; use torch.autocast instead")
    if model._get_ddp_logging_data().get("comm_hook"):
        raise RuntimeError(
            "this model has a communication hook already, and DDP allows one: wrap the module in DDP anew"
        )
    if any(id(memory) in _serving or memory.state() for memory in recipe.memories()):
        raise RuntimeError("this recipe is at work on a model already; make another one")


# Which attachment a memory serves, by the memory's id.
_serving: weakref.WeakValueDictionary[int, Attachment] = weakref.WeakValueDictionary()


def _managed(model: DistributedDataParallel) -> dict[str, nn.Parameter]:
    """Return the parameters whose gradients DDP reduces, by name, found as DDP finds them."""
    names: dict[nn.Parameter, str] = {}
    for prefix, module in model.module.named_modules():
        for name, p in module.named_parameters(recurse=False):
            if p.requires_grad and f"{prefix}.{name}" not in model.parameters_to_ignore:
                names.setdefault(p, f"{prefix}.{name}".removeprefix("."))
    if len(names) != model._get_ddp_logging_data()["num_parameter_tensors"]:
        raise RuntimeError("requires_grad has changed since DDP looked at it: wrap the module in DDP anew")
    if complex_ := [name for p, name in names.items() if p.is_complex()]:
        raise TypeError(
            f"{complex_[0]} is complex, and DDP's hooks see only half of its gradient: keep it as torch.view_as_real"
        )
    return {name: p for p, name in names.items()}


def _settings(model: DistributedDataParallel, optimizer: torch.optim.Optimizer | None) -> str:
    """Return in words what must be alike on all ranks besides recipe and parameters."""
    keys = ("momentum", "nesterov", "dampening", "weight_decay", "maximize")
    groups = [] if optimizer is None else [{k: g[k] for k in keys if k in g} for g in optimizer.param_groups]
    ddp = f"find_unused_parameters={model.find_unused_parameters}, static_graph={model.static_graph}"
    return f"{ddp}, optimizer groups {groups}"


def _with_sparse_gradients(model: DistributedDataParallel) -> set[torch.Tensor]:
    embeddings = (m for m in model.module.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag))
    return {m.weight for m in embeddings if m.sparse}


# DDP inspects this signature: a plain function whose second argument is called bucket.
def _hook(
    attachment: Attachment,
    bucket: dist.GradBucket,  # type: ignore[name-defined]  # a C++ class that torch's stubs leave out
) -> torch.futures.Future[torch.Tensor]:
    flat = bucket.buffer()
    if flat.is_sparse:
        return attachment.reduce_sparse(flat, bucket.parameters())
    return attachment.reduce(flat, bucket.parameters(), bucket.gradients())

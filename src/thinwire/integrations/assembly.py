"""From a recipe and a model's parameters to what reduces their gradients, whoever hands them over."""

import weakref
from collections.abc import Mapping

import torch
from torch import nn

from thinwire.exchanges.compat import Group
from thinwire.integrations.attachment import Attachment, LossScaler
from thinwire.integrations.fingerprint import check_fingerprint
from thinwire.integrations.momentum import corrections, refuse_twice, take_over
from thinwire.reducer import Reducer

_SAMPLE = 1 << 12


def assembled(
    recipe: Reducer,
    parameters: dict[str, nn.Parameter],
    names: Mapping[nn.Parameter, str],
    group: Group,
    *,
    settings: str,
    optimizer: torch.optim.Optimizer | None,
    scaler: LossScaler | None,
    may_be_unused: bool,
) -> Attachment:
    """Return the recipe at work on these parameters; `names` has those whose gradients are dense. A collective.

    Raises FingerprintError where ranks disagree, and MomentumError where momentum would be applied twice or not at all.
    """
    check_fingerprint(recipe, parameters, group, f"{_optimizer(optimizer)}, {settings}")
    kinds = {(p.dtype, p.device) for p in parameters.values()}
    recipe.prepare(group, [torch.ones(_SAMPLE, dtype=dtype, device=device) for dtype, device in kinds])
    decay = take_over(recipe.memories(), optimizer, names, group.size())
    attachment = Attachment(recipe, parameters, group, decay=decay, scaler=scaler, may_be_unused=may_be_unused)
    _serving.update({id(memory): attachment for memory in recipe.memories() if memory.stateful})
    if corrections(recipe.memories()):
        refuse_twice(attachment, names)
    return attachment


def check_free(recipe: Reducer) -> None:
    """Raise RuntimeError where a recipe's memories hold something already."""
    if any(id(memory) in _serving or memory.state() for memory in recipe.memories()):
        raise RuntimeError("this recipe is at work on a model already; make another one")


# Which attachment a memory serves, by the memory's id.
_serving: weakref.WeakValueDictionary[int, Attachment] = weakref.WeakValueDictionary()


def _optimizer(optimizer: torch.optim.Optimizer | None) -> str:
    """Return in words what of an optimizer must be alike on all ranks."""
    keys = ("momentum", "nesterov", "dampening", "weight_decay", "maximize")
    groups = [] if optimizer is None else [{k: g[k] for k in keys if k in g} for g in optimizer.param_groups]
    return f"optimizer groups {groups}"

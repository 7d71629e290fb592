"""Moving momentum from the optimizer into the memory, and seeing to it that it is not applied twice."""

import weakref
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from thinwire.errors import MomentumError
from thinwire.memories import Memory, MomentumCorrection

_FIX = (
    "pass attach(..., optimizer=optimizer), which moves momentum out of it, or use a recipe without momentum correction"
)


def corrections(memories: Sequence[Memory]) -> list[MomentumCorrection]:
    """Return the memories that apply momentum."""
    return [part for memory in memories for part in memory.parts if isinstance(part, MomentumCorrection)]


def take_over(
    memories: Sequence[Memory],
    optimizer: torch.optim.Optimizer | None,
    names: Mapping[nn.Parameter, str],
    world_size: int,
) -> dict[str, float]:
    """Move momentum and its buffers from the optimizer to the memories, and return the weight decay by parameter name.

    SGD adds weight decay to the gradient before momentum; it moves along, so that the sum stays what it was. Raises
    MomentumError, changing nothing, where the momentum cannot be moved or none is known.
    """
    correcting = corrections(memories)
    if not correcting:
        return {}
    if len(correcting) < len(memories):
        raise MomentumError(
            "parts of this recipe correct momentum and others would go without: give all of them the same "
            "MomentumCorrection, as in recipes.dense(memory=memory)"
        )
    if optimizer is None:
        if any(memory.momentum is None for memory in correcting):
            raise MomentumError(f"this recipe corrects momentum but knows none: {_FIX}, or give the recipe momentum=")
        return {}
    groups = [group for group in optimizer.param_groups if any(p in names for p in group["params"])]
    _check_holdings(groups, names)
    momentum, nesterov = _settings(optimizer, groups, correcting)
    velocities, decay = _collect(optimizer, groups, names, world_size)
    for memory in correcting:
        if momentum or memory.momentum is None:
            memory.adopt(momentum, nesterov=nesterov, velocities=velocities)
    for group in groups:
        group.update(momentum=0.0, nesterov=False, weight_decay=0.0)
        for p in group["params"]:
            optimizer.state.get(p, {}).pop("momentum_buffer", None)
    return decay


def _check_holdings(groups: list[dict[str, Any]], names: Mapping[nn.Parameter, str]) -> None:
    held = {p for group in groups for p in group["params"]}
    if missing := [name for p, name in names.items() if p not in held]:
        raise MomentumError(
            f"the optimizer does not hold {', '.join(missing[:3])}{', …' * (len(missing) > 3)}, and momentum "
            "correction covers the whole model: pass the one that updates all of it"
        )
    for group in groups:
        if (group.get("momentum") or group.get("weight_decay")) and any(
            p.requires_grad and p not in names for p in group["params"]
        ):
            raise MomentumError(
                "a parameter group mixes what can be moved with what cannot, sparse embeddings or parameters that this "
                "model does not reduce: put those in a group of their own"
            )


def _settings(
    optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]], memories: Sequence[MomentumCorrection]
) -> tuple[float, bool]:
    if any("dampening" not in group for group in groups):
        raise MomentumError(
            f"momentum correction takes the place of SGD's momentum; got {type(optimizer).__name__}: "
            "use torch.optim.SGD, or a recipe without momentum correction such as recipes.topk"
        )
    if any(group["dampening"] for group in groups):
        raise MomentumError("SGD's dampening cannot be moved into the memory; set dampening=0")
    found = {(float(group["momentum"]), bool(group["nesterov"])) for group in groups}
    if len(found) > 1:
        raise MomentumError(f"parameter groups have different (momentum, nesterov): {sorted(found)}; make them equal")
    momentum, nesterov = found.pop()
    given = {memory.momentum for memory in memories} - {None, momentum}
    if momentum and given:
        raise MomentumError(
            f"the recipe has momentum {given.pop()} and the optimizer {momentum}: leave one of them out"
        )
    return momentum, nesterov


def _collect(
    optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]], names: Mapping[nn.Parameter, str], world_size: int
) -> tuple[dict[str, Tensor], dict[str, float]]:
    velocities: dict[str, Tensor] = {}
    decay: dict[str, float] = {}
    for group in groups:
        sign = -1 if group["maximize"] else 1  # SGD turns the gradient round first; here that comes last
        for p in (p for p in group["params"] if p in names):
            if group["weight_decay"]:
                decay[names[p]] = sign * group["weight_decay"]
            buffer = optimizer.state.get(p, {}).get("momentum_buffer")
            if buffer is not None:
                velocities[names[p]] = _in_memory_order(buffer, p) * (sign / world_size)
    return velocities, decay


def _in_memory_order(buffer: Tensor, p: nn.Parameter) -> Tensor:
    """Return the buffer flat, in the order in which DDP lays out the parameter's gradient."""
    dtype = torch.promote_types(buffer.dtype, torch.float32)
    return torch.empty_like(p, dtype=dtype).copy_(buffer).as_strided((p.numel(),), (1,))


def refuse_twice(attachment: object, names: Mapping[nn.Parameter, str]) -> None:
    """Make every optimizer step on these parameters raise MomentumError if that optimizer applies momentum as well.

    Ends with the life of `attachment`.
    """
    _watch_optimizers()
    _watched[attachment] = frozenset(id(p) for p in names)


_watched: weakref.WeakKeyDictionary[object, frozenset[int]] = weakref.WeakKeyDictionary()


@cache
def _watch_optimizers() -> None:
    # Registered once for good: a handle cannot be removed while the hooks run.
    register_optimizer_step_pre_hook(_check_optimizer)


def _check_optimizer(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    owned = frozenset[int]().union(*_watched.values())
    for group in optimizer.param_groups:
        if (group.get("momentum") or any(group.get("betas", ())[:1])) and any(id(p) in owned for p in group["params"]):
            raise MomentumError(f"{type(optimizer).__name__} applies momentum a second time: {_FIX}")

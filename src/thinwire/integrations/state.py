"""What an attachment saves: tensors and plain containers, checked before anything is taken over."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.integrations.momentum import corrections
from thinwire.memories import Memory

VERSION = 1
_KEYS = {"version", "step", "loss_scale", "weight_decay", "momentum", "fields", "memories"}


def dump(step: int, loss_scale: float, memories: Sequence[Memory], decay: Mapping[str, float]) -> dict[str, Any]:
    """Return copies of everything that outlives a step. Memories are listed in the recipe's order."""
    return {
        "version": VERSION,
        "step": step,
        "loss_scale": loss_scale,
        "weight_decay": dict(decay),
        "momentum": [[memory.momentum, memory.nesterov] for memory in corrections(memories)],
        "fields": [sorted(memory.fields) for memory in memories],
        "memories": [
            {name: {field: x.clone() for field, x in fields.items()} for name, fields in memory.state().items()}
            for memory in memories
        ],
    }


def check(state: object, memories: Sequence[Memory], parameters: Mapping[str, nn.Parameter]) -> None:
    """Raise ValueError where `state` is not one that `dump` made for such memories and parameters."""
    if not isinstance(state, Mapping) or not state.keys() >= _KEYS:
        got = sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
        raise ValueError(f"an attachment's state has the keys {sorted(_KEYS)}; got {got}")
    _need(type(state["version"]) is int, "version", state["version"], "a number")
    _need(state["version"] == VERSION, "version", state["version"], f"{VERSION}, which this thinwire reads")
    _need(type(state["step"]) is int and state["step"] >= 0, "step", state["step"], "a count")
    _need(_is_number(state["loss_scale"]) and state["loss_scale"] > 0, "loss_scale", state["loss_scale"], "above 0")
    decay, momentum, saved = state["weight_decay"], state["momentum"], state["memories"]
    _need(isinstance(decay, Mapping) and all(map(_is_number, decay.values())), "weight_decay", decay, "numbers by name")
    _need(decay.keys() <= parameters.keys(), "weight_decay", sorted(map(str, decay)), "parameters of the model")
    _need(isinstance(momentum, list) and all(map(_is_momentum, momentum)), "momentum", momentum, "[number, bool] pairs")
    _need(isinstance(saved, list) and all(isinstance(m, Mapping) for m in saved), "memories", type(saved), "mappings")
    fields = [sorted(memory.fields) for memory in memories]
    if (len(saved), len(momentum), state["fields"]) != (len(memories), len(corrections(memories)), fields):
        raise ValueError("attachment state is of a recipe with other memories; attach the recipe it was saved with")
    for memory, by_name in zip(memories, saved, strict=True):
        for name, fields in by_name.items():
            _check_fields(name, fields, memory, parameters)


def _check_fields(name: object, fields: object, memory: Memory, parameters: Mapping[str, nn.Parameter]) -> None:
    if not isinstance(name, str) or name not in parameters:
        raise ValueError(f"attachment state has parameter {name!r}, which the model lacks")
    if not isinstance(fields, Mapping) or not fields or not fields.keys() <= memory.fields:
        raise ValueError(f"{name!r} has {fields!r:.100}; {type(memory).__name__} keeps {sorted(memory.fields)}")
    like = parameters[name]
    dtype = memory.held(like.dtype)
    for field, x in fields.items():
        if not isinstance(x, Tensor) or x.layout != torch.strided or x.is_meta:
            raise ValueError(f"{field} of {name!r} is {x!r:.100}; expected a tensor with values")
        if field in memory.free:
            _need(x.dim() == 1 and x.is_floating_point(), f"{field} of {name!r}", x.shape, "a flat tensor of numbers")
        elif x.shape != (like.numel(),) or x.dtype != dtype:
            raise ValueError(
                f"{field} of {name!r} has shape {tuple(x.shape)} and {x.dtype}; "
                f"expected ({like.numel()},) and {dtype}, as for a parameter of {like.dtype}"
            )


def _need(holds: bool, key: str, got: object, expected: str) -> None:
    if not holds:
        raise ValueError(f"{key} in attachment state is {got!r:.200}; expected {expected}")


def _is_number(x: object) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x)


def _is_momentum(x: object) -> bool:
    return isinstance(x, Sequence) and len(x) == 2 and _is_number(x[0]) and isinstance(x[1], bool)


def load(state: Mapping[str, Any], memories: Sequence[Memory], parameters: Mapping[str, nn.Parameter]) -> None:
    """Take `state` over into the memories, on the parameters' devices."""
    for memory, saved in zip(memories, state["memories"], strict=True):
        memory.restore({n: {f: x.to(parameters[n].device) for f, x in fields.items()} for n, fields in saved.items()})
    for correction, (momentum, nesterov) in zip(corrections(memories), state["momentum"], strict=True):
        correction.momentum, correction.nesterov = momentum, nesterov

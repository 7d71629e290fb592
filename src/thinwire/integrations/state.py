"""What an attachment saves: tensors and plain containers, checked before anything is taken over."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from thinwire.integrations.momentum import corrections
from thinwire.memories import Memory

VERSION = 1


def dump(step: int, memories: Sequence[Memory], decay: Mapping[str, float]) -> dict[str, Any]:
    """Return copies of everything that outlives a step. Memories are listed in the recipe's order."""
    return {
        "version": VERSION,
        "step": step,
        "weight_decay": dict(decay),
        "momentum": [[memory.momentum, memory.nesterov] for memory in corrections(memories)],
        "memories": [
            {name: {field: x.clone() for field, x in fields.items()} for name, fields in memory.state().items()}
            for memory in memories
        ],
    }


def check(state: Mapping[str, Any], memories: Sequence[Memory], parameters: Mapping[str, nn.Parameter]) -> None:
    """Raise ValueError where `state` is not one that `dump` made for such memories and parameters."""
    missing = {"version", "step", "weight_decay", "momentum", "memories"} - set(state)
    if missing:
        raise ValueError(f"attachment state lacks {sorted(missing)}; got keys {sorted(state)}")
    if state["version"] != VERSION:
        raise ValueError(f"attachment state has version {state['version']}; this thinwire reads version {VERSION}")
    if (len(state["memories"]), len(state["momentum"])) != (len(memories), len(corrections(memories))):
        raise ValueError("attachment state is of a recipe with other memories; attach the recipe it was saved with")
    for saved in state["memories"]:
        _check_tensors(saved, parameters)


def _check_tensors(saved: Mapping[str, Mapping[str, Tensor]], parameters: Mapping[str, nn.Parameter]) -> None:
    for name, fields in saved.items():
        if name not in parameters:
            raise ValueError(f"attachment state has parameter {name!r}, which the model lacks")
        for field, tensor in fields.items():
            if tensor.numel() != parameters[name].numel():
                raise ValueError(
                    f"{field} of {name!r} has {tensor.numel()} elements; the parameter has {parameters[name].numel()}"
                )


def load(state: Mapping[str, Any], memories: Sequence[Memory], parameters: Mapping[str, nn.Parameter]) -> None:
    """Take `state` over into the memories, on the parameters' devices."""
    for memory, saved in zip(memories, state["memories"], strict=True):
        memory.restore({n: {f: x.to(parameters[n].device) for f, x in fields.items()} for n, fields in saved.items()})
    for correction, (momentum, nesterov) in zip(corrections(memories), state["momentum"], strict=True):
        correction.momentum, correction.nesterov = momentum, nesterov

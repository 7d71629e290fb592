"""What an attachment saves: tensors and plain containers. They are checked and compared over ranks before use."""

import math
from collections import ChainMap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, islice, repeat
from typing import Any, final

import torch
from torch import Tensor, nn

from thinwire.collectives import Group, all_gather_plain
from thinwire.errors import StateError
from thinwire.integrations.momentum.correction import corrections
from thinwire.integrations.training.gradients import local, segment_of
from thinwire.memories import Memory
from thinwire.reducer import Reducer
from thinwire.reducer.base import words as words

VERSION = 2
AS_SAVED = ": attach it with the minimum_size with which the state was saved"
"""What to do where a recipe keeps nothing for a parameter, unless it is cut anew."""
_KEYS = {"version", "rank", "world_size", "recipe", "step", "draw", "loss_scale", "momentum", "fields", "memories"}


@final
@dataclass(frozen=True, kw_only=True)
class Standing:
    """What must agree on all ranks to go on together."""

    step: int
    draw: int
    recipe: str = ""


def kinds(memories: Sequence[Memory]) -> list[list[str]]:
    """Return the fields each memory keeps. Two recipes have the same memories if these are equal."""
    return [sorted(memory.fields) for memory in memories]


def waiting_length(recipe: Reducer, name: str, p: nn.Parameter) -> int:
    """Return how many elements of a parameter may wait on this rank."""
    return recipe.waiting_length(segment_of(p, name))


def agree(group: Group, mine: Callable[[], Standing]) -> None:
    """Compare where ranks stand; raise StateError if they differ, ValueError if `mine` raises on any; a collective."""
    error, standing = None, {}
    try:
        standing = asdict(mine())
    except ValueError as raised:
        error = raised
    except Exception as raised:  # whatever it is, the other ranks must not wait for this one
        error = ValueError(f"this is not what state_dict() returned on this rank: {raised!r:.200}")
    everyone = all_gather_plain((str(error or ""), standing), group)
    if error is not None:
        raise error
    if others := [rank for rank, said in enumerate(everyone) if len(said) != 2]:
        raise StateError(f"nothing was loaded, as ranks {others} train meanwhile: call load_state_dict() on all ranks")
    for rank, (message, theirs) in enumerate(everyone):
        if message:
            raise ValueError(f"nothing was loaded, because of rank {rank}: {message}")
        if theirs != everyone[0][1]:
            raise StateError(
                f"rank 0 resumes from {everyone[0][1]} and rank {rank} from {theirs}: on every rank load the state "
                "it saved, all from the same step, or load none"
            )


def check(
    state: object, recipe: Reducer, parameters: Mapping[str, nn.Parameter], *, rank: int, world_size: int
) -> Standing:
    """Return where `state` stands. Raises ValueError unless a rank saved it for such a recipe, model and rank."""
    held = renamed(_checked(state), parameters)
    if held["world_size"] != world_size:
        raise ValueError(
            f"attachment state is from {held['world_size']} ranks, and this job has {world_size}: reshard it with "
            "thinwire.redistribute or thinwire.Checkpoint; or start with empty memories: do not load it, and if the "
            "optimizer then raises MomentumError, call handle.forget()"
        )
    if held["rank"] != rank:
        raise ValueError(
            f"attachment state is rank {held['rank']}'s, and this is rank {rank}: load on each rank the state that it "
            "saved"
        )
    _check_memories(held, recipe, parameters)
    return Standing(step=held["step"], draw=held["draw"], recipe=held["recipe"])


def renamed(state: Mapping[str, Any], names: Iterable[str]) -> Mapping[str, Any]:
    """Return the state under these names where torch.compile alone has made others, by its prefix `_orig_mod.`."""
    here = {uncompiled(name): name for name in names}
    memories = [{here.get(uncompiled(name), name): x for name, x in each.items()} for each in state["memories"]]
    return {**state, "memories": memories}


def uncompiled(name: object) -> str:
    """Return a parameter's name without what torch.compile adds to it."""
    return str(name).replace("_orig_mod.", "")


def check_placed(state: object) -> None:
    """Raise ValueError unless a rank saved `state`, whatever for."""
    held = _checked(state)
    rank, count = held["rank"], held["world_size"]
    _need(0 <= rank < count, "rank", rank, f"a rank from 0 to {count - 1}")
    memories, kinds_held = held["memories"], held["fields"]
    alike = isinstance(kinds_held, list) and len(kinds_held) == len(memories)
    _need(alike and all(isinstance(kind, list) for kind in kinds_held), "fields", kinds_held, "those of each memory")
    for memory, kind in zip(memories, kinds_held, strict=True):
        for name, fields in memory.items():
            fits = isinstance(fields, Mapping) and all(field in kind for field in fields)
            _need(fits and all(isinstance(x, Tensor) for x in fields.values()), f"{name!r}", fields, f"tensors {kind}")


def load(state: Mapping[str, Any], memories: Sequence[Memory], parameters: Mapping[str, nn.Parameter]) -> None:
    """Load `state` into the memories, on the parameters' devices."""
    held = renamed(state, parameters)["memories"]
    for memory, saved in zip(memories, chain(held, repeat({})), strict=False):
        memory.restore({n: {f: x.to(parameters[n].device) for f, x in fields.items()} for n, fields in saved.items()})


def hold_alike(group: Group, memories: Sequence[Memory], parameters: Mapping[str, nn.Parameter]) -> None:
    """Hold zeros for whatever another rank holds: where a recipe changes, what is held decides. A collective."""
    mine = [{name: sorted(fields.keys() - m.free) for name, fields in m.state().items()} for m in memories]
    for memory, held in zip(memories, zip(*all_gather_plain(mine, group), strict=True), strict=True):
        wanted, have = dict(ChainMap(*held)), memory.state()
        if missing := wanted.keys() - have.keys():
            parts = {name: local(parameters[name]) for name in missing}
            blank = {n: torch.zeros(x.numel(), dtype=memory.held(x.dtype), device=x.device) for n, x in parts.items()}
            memory.restore({**have, **{n: {f: x.clone() for f in wanted[n]} for n, x in blank.items()}})


def _checked(state: object) -> Mapping[str, Any]:
    """Return the state. Raises ValueError unless it has what every state has."""
    if not isinstance(state, Mapping) or not state.keys() >= _KEYS:
        got = sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
        raise ValueError(f"an attachment's state has the keys {sorted(_KEYS)}; got {got}")
    version = state["version"]
    _need(type(version) is int and version == VERSION, "version", version, f"{VERSION}, which this thinwire reads")
    for key in ("step", "draw"):
        _need(type(state[key]) is int and 0 <= state[key] < 2**63, key, state[key], "a count")
    for key in ("rank", "world_size"):
        _need(type(state[key]) is int, key, state[key], "a number")
    _need(type(state["recipe"]) is str, "recipe", state["recipe"], "words")
    _need(_is_number(state["loss_scale"]) and state["loss_scale"] > 0, "loss_scale", state["loss_scale"], "above 0")
    momentum, saved = state["momentum"], state["memories"]
    pairs = isinstance(momentum, list) and all(isinstance(x, Sequence) and len(x) == 2 for x in momentum)
    pairs = pairs and all(_is_number(x) and isinstance(nesterov, bool) for x, nesterov in momentum)
    _need(pairs, "momentum", momentum, "[number, bool] pairs")
    _need(isinstance(saved, list) and all(isinstance(m, Mapping) for m in saved), "memories", type(saved), "mappings")
    return state


def _check_memories(state: Mapping[str, Any], recipe: Reducer, parameters: Mapping[str, nn.Parameter]) -> None:
    memories, saved = recipe.memories(), state["memories"]
    known = kinds(memories)[: len(saved) or None if recipe.changes else None]  # version 0.1 had fewer in "auto"
    if (len(state["momentum"]), state["fields"], len(saved)) != (len(corrections(memories)), known, len(known)):
        raise ValueError(
            "attachment state was saved from a recipe with a different kind of memory: it keeps "
            f"{state['fields']!r:.200}, and what is attached {known}: attach that recipe"
        )
    for memory, by_name in zip(memories, saved, strict=False):
        for name, values in by_name.items():
            _check_fields(name, values, memory, recipe, parameters)
            segment = segment_of(parameters[name], name)
            waits = any(bool(x.any()) for f, x in values.items() if f not in memory.free)
            if waits and not any(held is memory for held in recipe.holding(segment)):
                raise ValueError(
                    f"the residual of {name!r} would never be sent, as this recipe keeps none for a tensor of "
                    f"{segment.length} elements{AS_SAVED}"
                )


def _check_fields(
    name: object, fields: object, memory: Memory, recipe: Reducer, parameters: Mapping[str, nn.Parameter]
) -> None:
    if not isinstance(name, str) or name not in parameters:
        raise stranger(name, parameters)
    if not isinstance(fields, Mapping) or not fields or not fields.keys() <= memory.fields:
        raise ValueError(f"{name!r} has {fields!r:.100}; {type(memory).__name__} keeps {sorted(memory.fields)}")
    like, length = local(parameters[name]), waiting_length(recipe, name, parameters[name])
    dtype = memory.held(like.dtype)
    for field, x in fields.items():
        if not isinstance(x, Tensor) or x.layout != torch.strided or x.is_meta:
            raise ValueError(f"{field} of {name!r} is {x!r:.100}; expected a tensor with values")
        if field in memory.free:
            numbers = x.dim() == 1 and x.numel() > 0 and x.is_floating_point()
            _need(numbers, f"{field} of {name!r}", x.shape, "a flat tensor of numbers, of one at least")
        elif x.shape != (length,) or x.dtype != dtype:
            raise ValueError(
                f"{field} of {name!r} has shape {tuple(x.shape)} and {x.dtype}; "
                f"expected ({length},) and {dtype}, as for a parameter of {like.dtype}"
            )
        check_finite(x, f"{field} of {name!r}")


def stranger(name: object, known: Collection[str]) -> ValueError:
    """Return the error for a parameter of a state that is none of the model's."""
    own = f"{', '.join(map(repr, islice(known, 3)))}{', and so on' * (len(known) > 3)}"
    return ValueError(
        f"the state has parameter {name!r}, which the model lacks: it has {own}. Load the state of this model; if the "
        "parameter has another name now, rename it in each of state['memories']"
    )


def check_finite(x: Tensor, what: str) -> None:
    """Raise ValueError if what was saved would make every later step NaN."""
    if bad := x.numel() - int(x.isfinite().sum()):
        raise ValueError(f"{bad} of {x.numel()} values in {what} are not finite: load an earlier state")


def _need(holds: bool, key: str, got: object, expected: str) -> None:
    if not holds:
        raise ValueError(f"{key} in attachment state is {got!r:.200}; expected {expected}")


def _is_number(x: object) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x)

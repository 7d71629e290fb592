"""Resharding what ranks saved to other ranks: the sum of residuals over ranks does not change.

Gradients are divided by the world size as they enter a memory. So the residuals of all ranks add up to what the mean
still lacks, however many ranks there are: no factor is needed when that number changes.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.checked import Count, Size, checked
from thinwire.errors import StateError
from thinwire.integrations.membership import state
from thinwire.memories import Noted
from thinwire.memories.base import State

_OF_ONE_RANK = {"rank", "memories", "shard", "own"}
COMMON = "common:"
"""How the names of fields begin that are the same on all ranks, such as the global parameters of outer steps."""


@checked
def redistribute(
    states: Sequence[Mapping[str, Any]], *, rank: Size, world_size: Count, partial: bool = False
) -> dict[str, Any]:
    """Return the state that a rank resumes from, made of the `state_dict` of every rank that saved one.

    The residual of saved rank i, momentum included, goes to rank i mod world_size; ranks beyond that start with none.
    So sums over ranks stay the same: exactly if each rank takes over one residual, otherwise rounded once from float64.
    Notes, such as thresholds and PowerSGD's Q, cannot be added: each rank takes those of saved rank `rank` mod R, where
    R is the number of saved ranks. It multiplies them by R / world_size, because each gradient's weight in the mean
    changes by that factor. With an unchanged number of ranks each gets back exactly what it saved.

    Args:
        states: What `state_dict` returned, of every rank that saved.
        rank: This rank in the job that resumes.
        world_size: The number of ranks in the job that resumes.
        partial: Whether states may be missing. The residuals of those ranks are lost; the others keep theirs.

    Raises:
        StateError: If states differ in step, recipe, or anything else that ranks have in common, or if one is missing.
        ValueError: For anything but states, and for two states of the same rank.

    Example:
        >>> handle = tw.replicate(nn.Linear(64, 64), tw.recipes.topk(density=0.01))
        >>> states = [handle.state_dict()]  # of every rank that saved one
        >>> tw.redistribute(states, rank=1, world_size=2)["world_size"]
        2
    """
    if rank >= world_size:
        raise ValueError(f"rank is {rank}; expected 0 to {world_size - 1}")
    saved = _by_rank(states)
    count = next(iter(saved.values()))["world_size"]
    if not partial and (missing := sorted(set(range(count)) - saved.keys())):
        raise StateError(
            f"the state of rank {missing[0]} (of {count}) is missing: pass all, or partial=True to go on without its "
            "residuals"
        )
    notes = saved[noting(saved, rank, count)]
    taken = [saved[each]["memories"] for each in taken_over(saved, rank, world_size)]
    memories = [
        _joined([each[i] for each in taken], _scaled(memory, count / world_size))
        for i, memory in enumerate(notes["memories"])
    ]
    return {**notes, "rank": rank, "world_size": world_size, "memories": memories}


def noting_from(mine: State, theirs: State, factor: float) -> State:
    """Return one rank's residuals, with the notes of another times `factor`: old ranks over new ones."""
    return _joined([mine], _scaled(theirs, factor))


def waits(field: str) -> bool:
    """Whether this field is a residual, which adds up over ranks. Others are notes, or common to all ranks."""
    return field not in Noted.free and not field.startswith(COMMON)


def without_residuals(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state for a rank that joins: residuals stay where they are."""
    return {**saved, "memories": [_scaled(memory, 1) for memory in saved["memories"]]}


def taken_over(saved: Mapping[int, object], rank: int, world_size: int) -> list[int]:
    """Return which of the saved ranks' waiting shares go to `rank`."""
    return [each for each in sorted(saved) if each % world_size == rank]


def noting(saved: Mapping[int, object], rank: int, count: int) -> int:
    """Return the saved rank, of `count`, whose notes go to `rank`: its own or, if missing, the next there is."""
    return min(saved, key=lambda each: (each - rank) % count)


def _by_rank(states: Sequence[Mapping[str, Any]]) -> dict[int, Mapping[str, Any]]:
    if not states:
        raise ValueError("states is []; expected what each rank's state_dict() returned")
    saved: dict[int, Mapping[str, Any]] = {}
    for each in states:
        state.check_placed(each)
        if each.get("shard") != states[0].get("shard"):
            raise ValueError(
                "these are states of several shards: pass those of one, with rank=handle.group.rank() and "
                "world_size=handle.group.size()"
            )
        if each["rank"] in saved:
            raise ValueError(f"there are two states of rank {each['rank']}; pass each rank's own, once")
        saved[each["rank"]] = each
    first = states[0]
    for each in states[1:]:
        check_alike(first, each)
    return saved


def check_alike(first: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    """Raise StateError where states of one step differ in what ranks have in common."""
    for key in sorted((first.keys() | other.keys()) - _OF_ONE_RANK):
        one, two = first.get(key, "absent"), other.get(key, "absent")
        if one != two:
            raise StateError(
                f"these states do not belong together: {key} is {one!r:.200} on {_who(first)} and {two!r:.200} "
                f"on {_who(other)}; pass states of the same step"
            )


def _who(saved: Mapping[str, Any]) -> str:
    place = saved.get("shard")
    return f"rank {saved['rank']}" + (f", shard {place[0][0]}" if place else "")


def _joined(taken: Sequence[State], notes: State) -> State:
    """Return the sums of the residuals in these memories, by parameter, and these notes."""
    found: dict[str, dict[str, list[Tensor]]] = {}
    for memory in taken:
        for name, fields in memory.items():
            for field in filter(waits, fields):
                found.setdefault(name, {}).setdefault(field, []).append(fields[field])
    sums = {n: {f: _sum(parts, f"{f} of {n!r}") for f, parts in fields.items()} for n, fields in found.items()}
    return {name: sums.get(name, {}) | notes.get(name, {}) for name in sums | notes}


def _sum(parts: Sequence[Tensor], what: str) -> Tensor:
    if len(parts) == 1:
        return parts[0]
    kinds = {(tuple(part.shape), part.dtype) for part in parts}
    if len(kinds) > 1:
        raise ValueError(
            f"{what} has different shapes or dtypes on ranks: {sorted(map(str, kinds))}; expected the same"
        )
    total = parts[0].to(torch.float64)
    for part in parts[1:]:
        total = total + part
    return total.to(parts[0].dtype)


def _scaled(memory: State, factor: float) -> State:
    """Return what is no residual, the notes times a factor."""
    notes = {name: {f: x for f, x in fields.items() if not waits(f)} for name, fields in memory.items()}
    return {
        name: {f: x if factor == 1 or f not in Noted.free else x * factor for f, x in fields.items()}
        for name, fields in notes.items()
        if fields
    }

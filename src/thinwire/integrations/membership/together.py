"""What several groups of ranks, such as the rows and columns of a mesh, do on all of them or on none."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch.distributed as dist

from thinwire.checked import OnError
from thinwire.collectives import Group, all_gather_plain

T = TypeVar("T")


def group_or_all(group: Group | None) -> Group:
    """Return the group, by default that of all ranks. Raises RuntimeError if there is none."""
    found = group or dist.group.WORLD
    if found is None:
        raise RuntimeError("there is no process group yet: call torch.distributed.init_process_group() first")
    return found


def together(groups: Sequence[Group], check: Callable[[Group], None], *errors: type[Exception]) -> None:
    """Run a check over each group, which raises on all its ranks or none, and raise its errors on the whole mesh."""
    found: tuple[int, str] | None = None
    for group in groups:
        try:
            check(group)
        except errors as raised:
            found = found or (_kind(raised, errors), str(raised))
    if found := first_found(groups, found):
        raise errors[found[0]](found[1])


def agreed(
    groups: Sequence[Group],
    work: Callable[[], T],
    *errors: type[Exception],
    undo: Callable[[T], None] = lambda done: None,
) -> T:
    """Return what `work` gives on this rank. If it raises one of these errors on any rank of the mesh, raise on all.

    By default these are TypeError, ValueError and RuntimeError. Where it had worked, `undo` it then. The first error
    that fits names the kind: put special ones first. A collective of all ranks of the mesh.
    """
    errors = errors or (TypeError, ValueError, RuntimeError)
    done: list[T] = []
    own: Exception | None = None
    try:
        done.append(work())
    except errors as raised:
        own = raised
    me = f"rank {dist.get_rank() if dist.is_initialized() else [each.rank() for each in groups]}"
    found = first_found(groups, None if own is None else (_kind(own, errors), f"{me}: {own}"))
    if own is not None:
        raise own
    if found is not None:
        undo(done[0])
        raise errors[found[0]](found[1])
    return done[0]


def raise_on_all(groups_of: Callable[[Mapping[str, object]], Sequence[Group]]) -> OnError:
    """Return what raises, on every rank, a TypeError or ValueError that one rank alone has about its arguments.

    The other ranks, which `groups_of` finds from the arguments, hear of it in the function's first `agreed`.
    """

    def tell(error: Exception, given: Mapping[str, object]) -> None:
        def refuse() -> None:
            raise error

        agreed(groups_of(given), refuse, TypeError, ValueError)

    return tell


def given_group(given: Mapping[str, object]) -> list[Group]:
    """Return the group that is among a function's arguments, by default all ranks; none if there is none."""
    found = given.get("group") or dist.group.WORLD
    return [found] if isinstance(found, Group) else []


def first_found(groups: Sequence[Group], mine: T | None) -> T | None:
    """Return what some rank of the mesh has found, as JSON has it, first of all this one, else None; a collective."""
    for group in groups:  # along columns, then along rows: that reaches everybody
        everyone = all_gather_plain(mine, group)
        mine = mine if mine is not None else next((each for each in everyone if each is not None), None)
    return mine


def union(groups: Sequence[Group], mine: dict[int, str]) -> dict[int, str]:
    """Return what all ranks of the mesh have found. A collective of all of them."""
    for group in groups:
        mine = {rank: what for each in all_gather_plain([*mine.items()], group) for rank, what in each}
    return mine


def _kind(raised: Exception, errors: Sequence[type[Exception]]) -> int:
    return next(i for i, error in enumerate(errors) if isinstance(raised, error))

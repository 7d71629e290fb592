"""Checks over several groups of ranks, such as the rows and columns of a mesh, that fail on all of them or on none."""

from collections.abc import Callable, Sequence

import torch.distributed as dist

from thinwire.collectives import Group


def together(groups: Sequence[Group], check: Callable[[Group], None], *errors: type[Exception]) -> None:
    """Run a check over each group. If it raises one of these errors on any rank of the mesh, raise it on every rank.

    The check must raise on every rank of its group or on none. A collective of all ranks of the mesh.
    """
    found: tuple[int, str] | None = None
    for group in groups:
        try:
            check(group)
        except errors as raised:
            kind = next(i for i, error in enumerate(errors) if isinstance(raised, error))
            found = found or (kind, str(raised))
    for group in groups:  # along rows, then along columns: that reaches everybody
        everyone: list[tuple[int, str] | None] = [None] * group.size()
        dist.all_gather_object(everyone, found, group=group)
        found = found or next(filter(None, everyone), None)
    if found:
        raise errors[found[0]](found[1])

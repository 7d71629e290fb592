"""Uneven inputs: torch's Join, under which ranks that have run out of data keep the others company."""

import weakref
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

Divisor = Callable[[bool, bool], int]
"""Takes whether this rank has joined, and whether a reduction that begins goes on with a step; says by what to divide.

Raises RuntimeError where the reduction must not be.
"""


def active_ranks(model: DistributedDataParallel, *, all_of_them: bool) -> Divisor:
    """Return what counts the ranks, or those with data where Join was told to divide by that: a collective then.

    With `all_of_them`, Join is refused.
    """
    held = weakref.ref(model)

    def divisor(joined: bool, continues: bool) -> int:
        model = held()
        assert model is not None  # its hook is what calls
        if not model._join_config.enable:
            return model.process_group.size()
        _check(joined, continues, all_of_them)
        if model._divide_by_initial_world_size:
            return model.process_group.size()
        active = torch.tensor([0 if joined else 1], device=next(model.parameters()).device)
        dist.all_reduce(active, group=model.process_group)
        return int(active)

    return divisor


def _check(joined: bool, continues: bool, all_of_them: bool) -> None:
    if all_of_them:
        raise RuntimeError(
            "rebroadcast= and Join do not go together, as ranks that have joined take no steps: leave out either"
        )
    if continues and not joined:
        raise RuntimeError(
            "within Join a rank that has joined cannot know that gradients accumulate: use model.no_sync() for all but "
            "the last backward of a step"
        )

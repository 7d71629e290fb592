"""Uneven inputs: torch's Join, under which ranks that have run out of data keep the others company."""

import weakref
from typing import final

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


@final
class Joining:
    """Counts who still has data. With `fixed`, all must."""

    def __init__(self, model: DistributedDataParallel, *, fixed: bool) -> None:
        self._model, self._fixed = weakref.ref(model), fixed

    def begin(self, *, joined: bool, continues: bool) -> int:
        """Return the number of ranks, or of those with data where Join was told to divide by that. A collective then.

        Raises RuntimeError where the others would wait for ranks that have joined, or could not follow.
        """
        model = self._model()
        assert model is not None  # its hook is what calls
        size = model.process_group.size()
        if not model._join_config.enable:
            return size
        if self._fixed:
            raise RuntimeError(
                "rebroadcast= and Join do not go together, as ranks that have joined take no steps: leave out either"
            )
        if continues and not joined:
            raise RuntimeError(
                "within Join a rank that has joined cannot know that gradients accumulate: use model.no_sync() for all "
                "but the last backward of a step"
            )
        if model._divide_by_initial_world_size:
            return size
        active = torch.tensor([0 if joined else 1], device=next(model.parameters()).device)
        dist.all_reduce(active, group=model.process_group)
        return int(active)


@final
class Everybody:
    """All ranks, always."""

    def __init__(self, size: int) -> None:
        self._size = size

    def begin(self, *, joined: bool, continues: bool) -> int:
        """Return the number of ranks."""
        return self._size

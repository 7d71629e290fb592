"""Running statistics of batch normalisation, which no optimizer trains: workers average them at outer steps."""

from collections.abc import Iterable
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thinwire.collectives import Group

_NAMES = ("running_mean", "running_var")


@final
class RunningStatistics:
    """The buffers of a model that hold running means and variances, and what they were when workers last agreed."""

    def __init__(self, model: nn.Module) -> None:
        self.tensors = [x for name, x in model.named_buffers() if name.rpartition(".")[2] in _NAMES]
        self._agreed = [x.clone() for x in self.tensors]

    @torch.no_grad()
    def average(self, group: Group) -> None:
        """Replace each by its mean over ranks where it is finite, or by what it was if it is nowhere. A collective."""
        if not self.tensors:
            return
        sound = [x.isfinite().all() for x in self.tensors]
        parts = [torch.where(ok, x, 0).double().view(-1) for ok, x in zip(sound, self.tensors, strict=True)]
        flat = torch.cat([*parts, torch.stack(sound).double()])
        dist.all_reduce(flat, group=group)
        *totals, counts = flat.split([*(x.numel() for x in self.tensors), len(self.tensors)])
        for x, total, count, agreed in zip(self.tensors, totals, counts, self._agreed, strict=True):
            if bool(count):
                agreed.copy_((total / count).view_as(x))
            x.copy_(agreed)

    @torch.no_grad()
    def take(self, theirs: Iterable[Tensor]) -> None:
        """Take over another worker's."""
        for x, agreed, other in zip(self.tensors, self._agreed, theirs, strict=True):
            x.copy_(other)
            agreed.copy_(x if bool(x.isfinite().all()) else agreed)

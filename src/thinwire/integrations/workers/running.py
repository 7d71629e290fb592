"""Running statistics of batch normalisation, which no optimizer trains: workers average them at outer steps."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thinwire.collectives import Group

_NAMES = ("running_mean", "running_var")


def running_statistics(model: nn.Module) -> list[Tensor]:
    """Return the buffers that hold running means and variances."""
    return [x for name, x in model.named_buffers() if name.rpartition(".")[2] in _NAMES]


@torch.no_grad()
def average(tensors: Sequence[Tensor], group: Group) -> None:
    """Replace each tensor by its mean over the ranks where it is finite, if any. A collective, if there are tensors."""
    if not tensors:
        return
    sound = [x.isfinite().all() for x in tensors]
    parts = [torch.where(ok, x.detach(), 0).double().view(-1) for ok, x in zip(sound, tensors, strict=True)]
    flat = torch.cat([*parts, torch.stack(sound).double()])
    dist.all_reduce(flat, group=group)
    *totals, counts = flat.split([*(x.numel() for x in tensors), len(tensors)])
    for x, total, count in zip(tensors, totals, counts, strict=True):
        if bool(count):
            x.copy_((total / count).view_as(x))

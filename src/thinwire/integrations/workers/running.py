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
    """Replace each tensor by its mean over the group's ranks, if that is finite. A collective, if there are any."""
    if not tensors:
        return
    flat = torch.cat([x.detach().double().view(-1) for x in tensors])
    dist.all_reduce(flat, group=group)
    for x, total in zip(tensors, flat.split([x.numel() for x in tensors]), strict=True):
        if bool(total.isfinite().all()):
            x.copy_((total / group.size()).view_as(x))

"""Names that differ between torch 2.11 and the newest."""

import torch.distributed as dist
from torch import Tensor

Group = dist.ProcessGroup

# 2.13 renamed all_gather_into_tensor to all_gather_single and warns of the old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def all_gather(out: Tensor, mine: Tensor, group: Group) -> dist.Work:
    """Start gathering `mine` of every rank into `out`, of world size times its length."""
    return _all_gather(out, mine, group=group, async_op=True)


def all_reduce(x: Tensor, group: Group) -> dist.Work:
    """Start summing `x` over the ranks, in place."""
    return dist.all_reduce(x, group=group, async_op=True)

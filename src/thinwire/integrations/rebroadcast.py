"""Sending rank 0's parameters to all now and then, against drift."""

import weakref
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.exchanges.compat import Group
from thinwire.integrations.attachment import Attachment


def broadcast_every(steps: int, model: DistributedDataParallel, attachment: Attachment) -> None:
    """Broadcast the parameters before the first forward pass of every `steps`-th step that will be reduced."""
    sent_for = attachment.step  # DDP itself has just made replicas equal
    attached = weakref.ref(attachment)

    def before_forward(module: nn.Module, inputs: object) -> None:
        nonlocal sent_for
        assert isinstance(module, DistributedDataParallel)
        current = attached()
        # Evaluation and no_sync may run on some ranks only.
        if current is None or not (module.training and torch.is_grad_enabled() and module.require_backward_grad_sync):
            return
        if current.step % steps == 0 and current.step != sent_for:
            sent_for = current.step
            _broadcast(current.parameters, module.process_group)

    model.register_forward_pre_hook(before_forward)


@torch.no_grad()
def _broadcast(parameters: Mapping[str, nn.Parameter], group: Group) -> None:
    source = dist.get_process_group_ranks(group)[0]
    works = [dist.broadcast(p.detach(), source, group=group, async_op=True) for p in parameters.values()]
    for work in works:
        if work is not None:
            work.wait()

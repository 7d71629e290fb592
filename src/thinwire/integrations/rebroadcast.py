"""Sending rank 0's parameters to all now and then, against drift."""

import weakref

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

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
            _broadcast(module)

    model.register_forward_pre_hook(before_forward)


@torch.no_grad()
def _broadcast(model: DistributedDataParallel) -> None:
    group = model.process_group
    source = dist.get_process_group_ranks(group)[0]
    works = [dist.broadcast(p.detach(), source, group=group, async_op=True) for p in model.module.parameters()]
    for work in works:
        if work is not None:
            work.wait()

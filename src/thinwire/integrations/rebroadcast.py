"""Sending rank 0's parameters to all now and then, against drift."""

import weakref
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn

from thinwire.collectives import Group
from thinwire.integrations.attachment import Attachment


def broadcast_every(steps: int, attachment: Attachment, group: Group) -> None:
    """Broadcast the parameters whenever an optimizer has taken the last of so many steps: there all ranks come by."""
    sent_for = attachment.step  # DDP itself has just made replicas equal
    attached = weakref.ref(attachment)

    def after_step(step: int) -> None:
        nonlocal sent_for
        current = attached()
        if current is not None and step // steps > sent_for // steps:
            _broadcast(current.parameters, group)
        sent_for = step

    attachment.steps.on_kept.append(after_step)


@torch.no_grad()
def _broadcast(parameters: Mapping[str, nn.Parameter], group: Group) -> None:
    source = dist.get_process_group_ranks(group)[0]
    works = [dist.broadcast(p.detach(), source, group=group, async_op=True) for p in parameters.values()]
    for work in works:
        if work is not None:
            work.wait()

"""Comparing where ranks stand before DDP's own first collective of a training.

A rank may not have loaded what the others have. The first reduction finds that out, but where the model has buffers,
DDP sends them in the forward pass before it. That would meet the comparison of the ranks that load, and hang.
"""

import weakref
from typing import Any, final

import torch
from torch import nn
from torch._compile import _disable_dynamo as untraced
from torch.nn.parallel import DistributedDataParallel

from thinwire.integrations.membership.membership import Membership
from thinwire.integrations.training.whole import Hook


def compare_before_buffers(model: DistributedDataParallel, membership: Membership) -> None:
    """Have ranks compare where they stand before the first forward pass in training, if DDP sends buffers there."""
    if model.broadcast_buffers and model.modules_buffers:
        hook = _BeforeForward(membership)
        hook.handle = model.register_forward_pre_hook(hook)


@final
class _BeforeForward:
    """Compares once before training: an evaluation may be one rank's alone, and in Join some have no data."""

    handle: Any

    def __init__(self, membership: Membership) -> None:
        self._membership = weakref.ref(membership)
        self._put_off = False

    @untraced  # which must not trace a collective
    def __call__(self, model: nn.Module, inputs: object) -> None:
        assert isinstance(model, DistributedDataParallel)
        membership = self._membership()
        if membership is None or membership.agreed:
            self.handle.remove()
        elif not model._join_config.enable:
            if not (model.training and torch.is_grad_enabled()):
                self._put_off |= model.require_forward_param_sync
                model.require_forward_param_sync = False
                return
            membership.agree()
        if self._put_off:
            model.require_forward_param_sync, self._put_off = True, False

    def __reduce__(self) -> tuple[Any, ...]:
        """Stay behind when the model is copied or saved, as DDP's own hook does."""
        return Hook, ()

"""Plain DDP steps: as long as nothing pays, DDP works without a hook and `Adaptive` watches."""

import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo as untraced
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from thinwire.integrations.attachments.attachment import Attachment
from thinwire.integrations.training.optimizers import Hook
from thinwire.planner.live import Adaptive
from thinwire.planner.live.step_log import Log
from thinwire.planner.probe.measure import Stamp, stamp
from thinwire.reducer import Segment
from thinwire.trace import ring_bytes


@final
class PlainSteps:
    """Lets `adaptive` watch while DDP works without a hook, and installs the hook as soon as something pays.

    When does a reduced step end? When its backward does: nothing is in flight then, and every rank gets there once a
    step, whatever it runs in between. A forward pass may be one rank's alone. To see that a step is reduced, we watch
    one parameter's gradient, which every rank must have in every step. Within DDP's Join we install the hook at once,
    because ranks that have joined take no steps.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        parameters: Mapping[str, nn.Parameter],
        attachment: Attachment,
        adaptive: Adaptive,
        install: Callable[[DistributedDataParallel, Attachment], None],
    ) -> None:
        self._attachment, self._adaptive, self._install = attachment, adaptive, install
        self._rank, self._size = model.process_group.rank(), model.process_group.size()
        *others, (self._last, p) = parameters.items()
        self._device = p.device
        segments = [Segment(name=name, offset=0, length=q.numel()) for name, q in parameters.items()]
        self._parts = [([s], q.element_size()) for s, q in zip(segments, parameters.values(), strict=True)]
        self._forward: Stamp | None = None
        self._ready: dict[str, Stamp] = {}
        self._ended: Stamp | None = None
        self._handles: list[Any] = [
            model.register_forward_pre_hook(self),
            p.register_post_accumulate_grad_hook(self._count),
        ]
        self._noting = [q.register_post_accumulate_grad_hook(partial(self._note, name)) for name, q in others]
        self._accumulating = False
        # Parameters may outlive the model that wraps them.
        weakref.finalize(model, _remove, self._handles)
        weakref.finalize(model, _remove, self._noting)

    @untraced
    def __call__(self, model: nn.Module, inputs: object) -> None:
        """Begin a step, or install the hook: a forward pass begins."""
        assert isinstance(model, DistributedDataParallel)
        if self._attachment.recipe is not self._adaptive:  # removed
            self._attachment.exchanges = False
            _remove(self._handles)
            return _remove(self._noting)
        if not (torch.is_grad_enabled() and model.require_backward_grad_sync):
            self._accumulating |= torch.is_grad_enabled()
            return
        self._attachment.exchanges = False  # DDP reduces this one
        if self._adaptive.settled:  # the timeline is known
            _remove(self._noting)
        self._forward, self._ready = stamp(self._device), {}
        if not self._adaptive.idle or model._join_config.enable:
            _remove(self._handles)
            if not self._accumulating:  # .grad, if it is there, holds DDP's mean
                self._attachment.steps.gradients.note_reduced(self._attachment.parameters)
            self._install(model, self._attachment)
        self._accumulating = False

    def __reduce__(self) -> tuple[Any, ...]:
        """Stay behind when the model is copied or saved, as DDP's own hook does."""
        return Hook, ()

    def _count(self, p: Tensor) -> None:
        if self._forward is not None and self._last not in self._ready:
            steps, meter = self._attachment.steps, self._attachment.meter
            sent = ring_bytes(sum(size * segment.length for (segment,), size in self._parts), self._size)
            numel = sum(segment.length for (segment,), _ in self._parts)
            meter.begin(steps.step)
            for name, amount in (("sent_bytes", sent), ("dense_bytes", sent), ("values", numel), ("elements", numel)):
                meter.add(name, amount)
            steps.step, steps.draw = steps.step + 1, steps.draw + 1
            self._note(self._last, p)
            queue = Variable._execution_engine.queue_callback
            end = partial(self._end, self._forward, self._ready)
            queue(partial(queue, end))  # behind what DDP has yet to queue

    def _end(self, forward: Stamp, ready: Mapping[str, Stamp]) -> None:
        """End the step: all of its gradients are reduced. It began where the one before ended, with backward."""
        if self._attachment.recipe is self._adaptive:
            times = [ready.get(segment.name, forward) for (segment,), _ in self._parts]
            log = Log(self._ended or forward, stamp(self._device), forward, times, self._parts)
            self._adaptive.go_on(log, self._attachment.step, self._rank)
            self._ended = stamp(self._device)

    def _note(self, name: str, p: Tensor) -> None:
        if self._forward is not None:
            self._ready[name] = stamp(self._device)


def _remove(handles: list[Any]) -> None:
    while handles:
        handles.pop().remove()

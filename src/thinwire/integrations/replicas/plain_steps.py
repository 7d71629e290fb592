"""Plain DDP steps: as long as nothing pays, DDP works without a hook and `Adaptive` watches."""

import weakref
from collections.abc import Callable, Mapping, Sequence
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
from thinwire.planner.probe.measure import Stamp, stamp
from thinwire.planner.profile import Gradient
from thinwire.trace import ring_bytes


@final
class PlainLog:
    """When things happened in a step that DDP reduced itself. It begins where the one before ended, with backward."""

    def __init__(self, gradients: Sequence[Gradient], forward: Stamp, before: Stamp | None) -> None:
        self._gradients, self._forward, self._began, self._ended = gradients, forward, before or forward, forward
        self.ready: dict[str, Stamp] = {}

    def close(self, now: Stamp) -> None:
        """Note when DDP had reduced everything."""
        self._ended = now

    @property
    def period(self) -> float:
        """Seconds from the end of one backward to that of the next."""
        return self._ended.since(self._began)

    @property
    def buckets(self) -> list[tuple[Gradient, ...]]:
        """The gradients, in the model's order. Each is a bucket."""
        return [(gradient,) for gradient in self._gradients]

    @property
    def offsets(self) -> list[float]:
        """Seconds from the beginning of the forward pass to each gradient."""
        return [self.ready.get(gradient.name, self._forward).since(self._forward) for gradient in self._gradients]


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
        self._gradients = [
            Gradient(name=name, numel=q.numel(), itemsize=q.element_size()) for name, q in parameters.items()
        ]
        self._log: PlainLog | None = None
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
        self._log = PlainLog(self._gradients, stamp(self._device), self._ended)
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
        if self._log is not None and self._last not in self._log.ready:
            self._note_step()
            self._note(self._last, p)
            queue = Variable._execution_engine.queue_callback
            queue(partial(queue, partial(self._end, self._log)))  # behind what DDP has yet to queue

    def _end(self, log: PlainLog) -> None:
        """End the step: all of its gradients are reduced."""
        if self._attachment.recipe is self._adaptive:
            log.close(stamp(self._device))
            self._adaptive.go_on(log, self._attachment.step, self._rank)
            self._ended = stamp(self._device)

    def _note_step(self) -> None:
        steps, meter = self._attachment.steps, self._attachment.meter
        sent = ring_bytes(sum(g.nbytes for g in self._gradients), self._size)
        numel = sum(g.numel for g in self._gradients)
        meter.begin(steps.step)
        for name, amount in (("sent_bytes", sent), ("dense_bytes", sent), ("values", numel), ("elements", numel)):
            meter.add(name, amount)
        steps.step += 1
        steps.draw += 1

    def _note(self, name: str, p: Tensor) -> None:
        if self._log is not None:
            self._log.ready[name] = stamp(self._device)


def _remove(handles: list[Any]) -> None:
    while handles:
        handles.pop().remove()

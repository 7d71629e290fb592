"""Plain DDP steps: as long as nothing pays, DDP works without a hook and `Adaptive` watches."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo as untraced
from torch.nn.parallel import DistributedDataParallel

from thinwire.integrations.attachments.attachment import Attachment
from thinwire.integrations.replicas.copies import STAYS_BEHIND
from thinwire.planner.live import Adaptive
from thinwire.planner.probe.measure import Stamp, stamp
from thinwire.planner.profile import Gradient
from thinwire.stats import ring_bytes


@final
class PlainLog:
    """When things happened in a step that DDP reduced itself, from the forward pass on. Each gradient is a bucket."""

    def __init__(self, gradients: Sequence[Gradient], forward: Stamp) -> None:
        self._gradients, self._forward, self._next = gradients, forward, forward
        self.ready: dict[str, Stamp] = {}

    def close(self, now: Stamp) -> None:
        """Note when the next step's forward pass began."""
        self._next = now

    @property
    def period(self) -> float:
        """Seconds from one forward pass to the next."""
        return self._next.since(self._forward)

    @property
    def buckets(self) -> list[tuple[Gradient, ...]]:
        """The gradients, in the model's order."""
        return [(gradient,) for gradient in self._gradients]

    @property
    def offsets(self) -> list[float]:
        """Seconds from the beginning of the forward pass to each gradient."""
        return [self.ready.get(gradient.name, self._forward).since(self._forward) for gradient in self._gradients]


@final
class PlainSteps:
    """Lets `adaptive` watch while DDP works without a hook, and installs the hook as soon as something pays.

    When does a reduced step end? When the next forward pass that DDP will reduce begins: nothing is in flight then, and
    every rank gets there once a step, whatever it runs in between. To see that a step was reduced, we watch one
    parameter's gradient, which every rank must have in every step. Within DDP's Join we install the hook at once,
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
        """End the previous step and begin one: a forward pass begins."""
        assert isinstance(model, DistributedDataParallel)
        if self._attachment.recipe is not self._adaptive:  # removed
            self._attachment.exchanges = False
            _remove(self._handles)
            return _remove(self._noting)
        if not (torch.is_grad_enabled() and model.require_backward_grad_sync):
            self._accumulating |= torch.is_grad_enabled()
            return
        self._attachment.exchanges = False  # DDP reduces this one
        if self._log is not None and self._last in self._log.ready:
            self._log.close(stamp(self._device))
            self._adaptive.go_on(self._log, self._attachment.step, self._rank)
        if self._adaptive.settled:  # the timeline is known
            _remove(self._noting)
        self._log = PlainLog(self._gradients, stamp(self._device))
        if not self._adaptive.idle or model._join_config.enable:
            _remove(self._handles)
            if not self._accumulating:  # .grad, if it is there, holds DDP's mean
                self._attachment.steps.gradients.note_reduced(self._attachment.parameters)
            self._install(model, self._attachment)
        self._accumulating = False

    def __reduce__(self) -> tuple[Any, ...]:
        """Stay behind when the model is copied or saved, as DDP's own hook does."""
        return STAYS_BEHIND

    def _count(self, p: Tensor) -> None:
        if self._log is not None and self._last not in self._log.ready:
            self._note_step()
            self._note(self._last, p)

    def _note_step(self) -> None:
        """Count the step, and what DDP sends in it."""
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

"""DDP as it is, for as long as nothing pays."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.integrations.attachment import Attachment
from thinwire.planner.live import Adaptive
from thinwire.planner.probe.clock import Stamp, stamp
from thinwire.planner.profile import Gradient


@final
class PlainLog:
    """Moments of a step that DDP reduces by itself, from `forward` on. Every gradient is a bucket of its own."""

    def __init__(self, gradients: Sequence[Gradient], forward: Stamp, first: Stamp, ready: Mapping[str, Stamp]) -> None:
        self._gradients, self._forward, self._first, self._ready = gradients, forward, first, ready
        self._next = first

    def close(self, now: Stamp) -> None:
        """Note when the next step came to where this one was noticed."""
        self._next = now

    @property
    def period(self) -> float:
        """Seconds from where the step was noticed to the same of the next."""
        return self._next.since(self._first)

    @property
    def buckets(self) -> list[tuple[Gradient, ...]]:
        """The gradients, in the model's order."""
        return [(gradient,) for gradient in self._gradients]

    @property
    def offsets(self) -> list[float]:
        """Seconds from the beginning of the forward pass to each gradient."""
        return [self._ready.get(gradient.name, self._first).since(self._forward) for gradient in self._gradients]


@final
class PlainSteps:
    """Lets `adaptive` look on while DDP works without a hook, and installs the hook as soon as something pays.

    A step is noticed by one parameter's gradient, which every rank must have in every step. What is decided then holds
    from the next step on. Within DDP's Join the hook is installed at once, as ranks that have joined take no steps.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        parameters: Mapping[str, nn.Parameter],
        attachment: Attachment,
        adaptive: Adaptive,
        install: Callable[[], None],
    ) -> None:
        self._attachment, self._adaptive, self._install = attachment, adaptive, install
        self._rank = model.process_group.rank()
        *others, (last, p) = parameters.items()
        self._device = p.device
        self._gradients = [
            Gradient(name=name, numel=q.numel(), itemsize=q.element_size()) for name, q in parameters.items()
        ]
        self._forward: Stamp | None = None
        self._ready: dict[str, Stamp] = {}
        self._log: PlainLog | None = None
        self._handles: list[Any] = [
            model.register_forward_pre_hook(self._before_forward),
            p.register_post_accumulate_grad_hook(partial(self._notice, last)),
        ]
        self._noting = [q.register_post_accumulate_grad_hook(partial(self._note, name)) for name, q in others]

    def __reduce__(self) -> tuple[Any, ...]:
        """Be left behind where the model is copied or saved, as DDP leaves its hook."""
        return _Nobody, ()

    def _before_forward(self, model: nn.Module, inputs: object) -> None:
        assert isinstance(model, DistributedDataParallel)
        reduced = torch.is_grad_enabled() and model.require_backward_grad_sync
        self._forward, self._ready = (stamp(self._device) if reduced else None), {}
        if not self._adaptive.idle or model._join_config.enable:
            _remove(self._handles)
            _remove(self._noting)
            self._install()

    def _notice(self, name: str, p: Tensor) -> None:
        """Begin a step, with which the one before is over."""
        if self._forward is None:
            return
        now = stamp(self._device)
        if self._log is not None:
            self._log.close(now)
            self._adaptive.go_on(self._log, self._attachment.step, self._rank)
        self._note(name, p)
        self._log = PlainLog(self._gradients, self._forward, stamp(self._device), self._ready)
        self._attachment.count_plain_step()
        if self._adaptive.settled:  # and the timeline is known
            _remove(self._noting)

    def _note(self, name: str, p: Tensor) -> None:
        self._ready[name] = stamp(self._device)


@final
class _Nobody:
    def _before_forward(self, model: nn.Module, inputs: object) -> None:
        """Do nothing."""


def _remove(handles: list[Any]) -> None:
    while handles:
        handles.pop().remove()

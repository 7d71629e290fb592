"""Momentum correction with factor masking."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self, final

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from thinwire.checked import Fraction, Positive, checked
from thinwire.kernels import Sum
from thinwire.kernels.parts import Ints, Vectors, sizes
from thinwire.memories.base import Memory, limited_each
from thinwire.memories.staged import Staged
from thinwire.payloads import Payload
from thinwire.signals import Plain, Signal, Signals, SummedEach
from thinwire.waits import on_host


@final
@checked
@dataclass(kw_only=True)
class MomentumCorrection(Memory):
    """Keep u ← m·u + g and v ← v + u, and send from v (Deep Gradient Compression, Lin et al. 2018, §3).

    Momentum is applied here, before sparsification, so the optimizer itself must have none. It is applied once per
    step: any further part of a step's gradient is added to u as it is. If everything is sent, rounded or not, the
    result is SGD with momentum.

    Args:
        momentum: m; None takes the optimizer's.
        nesterov: Whether g + m·u is added to v instead of u.
        masking: Whether u is set to 0 where v was sent, unless all of v was.
        clip_norm: Clips each rank's gradient, per tensor and without its loss scale, to a norm of clip_norm/√world_size
            before it is added (local gradient clipping).
    """

    momentum: Fraction | None = None
    nesterov: bool = False
    masking: bool = True
    clip_norm: Positive | None = None
    _residual: Staged = field(default_factory=Staged, init=False, repr=False)
    _velocity: Staged = field(default_factory=Staged, init=False, repr=False)

    def adopt(self, momentum: float, *, nesterov: bool) -> None:
        """Take over an optimizer's `momentum`, and whether it is Nesterov's."""
        self.momentum, self.nesterov = momentum, nesterov

    def blank(self) -> Self:
        """Return an empty memory with the same settings, and momentum 0 if none is known yet."""
        return replace(self, momentum=self.momentum or 0.0)

    def compensate_each(self, names: Sequence[str], gradients: Vectors, scale: float, seeds: Ints) -> Signals:
        """Return v + u of each after adding scale · g to u.

        Raises:
            RuntimeError: When no momentum is known.
        """
        if self.momentum is None:
            raise RuntimeError("momentum is not known: attach with optimizer=, or give the recipe momentum=")
        gradients, scales = limited_each(gradients, scale, self.clip_norm, self._loss_scale)
        if self._residual.continue_any(names):
            parts = zip(names, gradients, scales, strict=True)
            return Signals([self._one(name, gradient, own, self.momentum) for name, gradient, own in parts])
        return self._summed(names, gradients, scales, self.momentum)

    def retain(self, names: Sequence[str], delivered: Payload) -> None:
        """Subtract what was delivered. With `masking`, clear its momentum too, unless everything was delivered."""
        residuals = self._residual.staged_each(names)
        if not (self.masking and delivered.masks):
            delivered.subtract_from(residuals)
            return
        velocities = self._velocity.staged_each(names)
        if (np.array(delivered.counts()) < sizes(residuals)).all():  # nowhere can all have gone
            delivered.take_from(residuals, velocities)
            return
        delivered.subtract_from(residuals)
        went = _all_went(delivered, residuals)
        unread = [(v, v.clone(), x) for v, x in zip(velocities, went, strict=True) if isinstance(x, Tensor)]
        delivered.mask([None if all_ is True else v for v, all_ in zip(velocities, went, strict=True)])
        for velocity, before, all_ in unread:
            velocity.copy_(torch.where(all_, before, velocity))

    def _summed(self, names: Sequence[str], gradients: Vectors, scales: Sequence[float], momentum: float) -> Signals:
        residuals, outs = self._residual.open_each(names, gradients)
        velocities, moving = self._velocity.open_each(names, gradients)
        return SummedEach(Sum(outs, residuals, gradients, scales, None, moving, velocities, momentum, self.nesterov))

    def _one(self, name: str, gradient: Tensor, scale: float, momentum: float) -> Signal:
        """Add another part of a step's gradient, if it is one: u ← u + g;  v ← v + g, or v + (1 + m)·g."""
        if not self._residual.continue_any([name]):
            return self._summed([name], [gradient], [scale], momentum)[0]
        residual, velocity = self._residual.staged(name), self._velocity.staged(name)
        velocity.add_(gradient, alpha=scale)
        residual.add_(gradient, alpha=scale * (1 + momentum) if self.nesterov else scale)
        return Plain(residual, gradient.dtype)

    @override
    def tensors(self) -> Mapping[str, Staged]:
        return {"residual": self._residual, "velocity": self._velocity}


def _all_went(delivered: Payload, residuals: Sequence[Tensor]) -> list[bool | Tensor]:
    """Whether everything was delivered of each region; a 0-dim tensor where only a GPU knows.

    What was chosen may leave a remainder, as 16 bits and codes round. So what counts is what was not chosen, other than
    what is 0 in the dtype, or by the code, in which values travel.
    """
    left = [x.clone() if n >= x.numel() else None for n, x in zip(delivered.counts(), residuals, strict=True)]
    if any(x is not None for x in left):
        coded, values = getattr(delivered, "coded", None) is not None, delivered.values
        (delivered.with_values(torch.ones_like(values)) if coded else delivered).mask(left)
    found = [x if x is None else x.to(delivered.values.dtype).any() for x in left]
    return [x is not None and (not bool(x) if on_host(x) else ~x) for x in found]

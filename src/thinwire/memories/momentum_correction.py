"""Momentum correction with factor masking."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self, final

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from thinwire import kernels
from thinwire.checked import Fraction, Positive, checked
from thinwire.kernels import Draw, Picks
from thinwire.kernels.parts import sizes
from thinwire.memories.base import Memory
from thinwire.memories.clipping import LocalClipping
from thinwire.memories.staged import Staged
from thinwire.payloads import Payload
from thinwire.signals import Plain, Signal, Signals
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
        clip_norm: Per tensor and in units of the mean gradient, limits each rank's ‖g‖ to clip_norm/√world_size before
            it is added (local gradient clipping).
    """

    fields: ClassVar[frozenset[str]] = frozenset({"residual", "velocity"})

    momentum: Fraction | None = None
    nesterov: bool = False
    masking: bool = True
    clip_norm: Positive | None = None
    _residual: Staged = field(default_factory=Staged, init=False, repr=False)
    _velocity: Staged = field(default_factory=Staged, init=False, repr=False)
    _clipping: LocalClipping = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._clipping = LocalClipping(self.clip_norm)

    def adopt(self, momentum: float, *, nesterov: bool) -> None:
        """Take over an optimizer's momentum settings."""
        self.momentum, self.nesterov = momentum, nesterov

    def blank(self) -> Self:
        """Return an empty memory with the same settings, and momentum 0 if none is known yet."""
        return replace(self, momentum=self.momentum or 0.0)

    def compensate(self, name: str, gradient: Tensor, scale: float, *, seed: int = 0) -> Signal:
        """Return v + u after adding scale · g to u. Raises RuntimeError when no momentum is known."""
        if self.momentum is None:
            raise RuntimeError("momentum is not known: attach with optimizer=, or give the recipe momentum=")
        gradient, scale = self._clipping.limited(gradient, scale)
        if self._residual.continues(name):
            return self._more(name, gradient, scale, self.momentum)
        residual, out = self._residual.open(name, gradient)
        velocity, velocity_out = self._velocity.open(name, gradient)
        return _MomentumSum(out, velocity_out, residual, velocity, gradient, scale, self.momentum, self.nesterov)

    @override
    def compensate_each(
        self, names: Sequence[str], gradients: Sequence[Tensor], scale: float, seeds: Sequence[int]
    ) -> Signals:
        if self.momentum is None or self._residual.continue_any(names):
            return super().compensate_each(names, gradients, scale, seeds)
        gradients, scales = self._clipping.limited_each(gradients, scale)
        residuals, outs = self._residual.open_each(names, gradients)
        velocities, moving = self._velocity.open_each(names, gradients)
        return _MomentumSums((outs, moving, residuals, velocities, gradients, scales), (self.momentum, self.nesterov))

    def retain(self, names: Sequence[str], delivered: Payload) -> None:
        """Subtract what was delivered. With `masking`, clear its momentum too, unless everything was delivered."""
        residuals = self._residual.staged_each(names)
        delivered.subtract_from(residuals)
        if not (self.masking and delivered.masks):
            return
        velocities = self._velocity.staged_each(names)
        if (np.array(delivered.counts()) < sizes(residuals)).all():  # nowhere can all have gone
            delivered.mask(velocities)
            return
        went = _all_went(delivered, residuals)
        unread = [(v, v.clone(), x) for v, x in zip(velocities, went, strict=True) if isinstance(x, Tensor)]
        delivered.mask([None if all_ is True else v for v, all_ in zip(velocities, went, strict=True)])
        for velocity, before, all_ in unread:
            velocity.copy_(torch.where(all_, before, velocity))

    def _more(self, name: str, gradient: Tensor, scale: float, momentum: float) -> Signal:
        """Add another part of a step's gradient: u ← u + g;  v ← v + g, or v + (1 + m)·g."""
        residual, velocity = self._residual.staged(name), self._velocity.staged(name)
        velocity.add_(gradient, alpha=scale)
        residual.add_(gradient, alpha=scale * (1 + momentum) if self.nesterov else scale)
        return Plain(residual, gradient.dtype)

    @override
    def tensors(self) -> Mapping[str, Staged]:
        return {"residual": self._residual, "velocity": self._velocity}

    @override
    def rescale(self, factor: float) -> None:
        super().rescale(factor)
        self._clipping.rescale(factor)


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


@final
class _MomentumSum(Signal):
    """v + u', with u' = m·u + scale · g, computed into `out` and `velocity_out`."""

    def __init__(
        self,
        out: Tensor,
        velocity_out: Tensor,
        residual: Tensor,
        velocity: Tensor,
        gradient: Tensor,
        scale: float,
        momentum: float,
        nesterov: bool,
    ) -> None:
        self._tensors = (out, velocity_out, residual, velocity, gradient)
        self._factors = (scale, momentum, nesterov)
        self.dtype, self.numel, self.device = gradient.dtype, gradient.numel(), gradient.device

    def tensor(self) -> Tensor:
        if not self.computed:
            self.computed = True
            kernels.accumulate_momentum(*self._tensors, *self._factors)
        return self._tensors[0]

    def sample(self, offset: int, stride: int) -> Tensor:
        residual, velocity, gradient = (tensor[offset::stride] for tensor in self._tensors[2:])
        return kernels.momentum_sum(residual, velocity, gradient, *self._factors)

    def select(self, threshold: Tensor, capacity: int) -> Picks:
        self.computed = True
        return kernels.accumulate_momentum_select(*self._tensors, *self._factors, threshold, capacity)


@final
class _MomentumSums(Signals):
    """The same of a bucket: the tensors and scales of each, and what is the same for all."""

    def __init__(self, columns: tuple[Sequence[Any], ...], factors: tuple[float, bool]) -> None:
        super().__init__((), *columns)
        like, self._factors = columns[4][0], factors
        self.dtype, self.device = like.dtype, like.device

    def _make(self, *columns: Any) -> Signal:
        return _MomentumSum(*(*columns, *self._factors))

    def _tensors(self, some: slice, _: object = None) -> Sequence[Tensor]:
        outs: Sequence[Tensor] = self._part(some)[0]
        if not all(self._done[some]):
            if self._begun(some):
                return super()._tensors(some)
            for *tensors, scale in zip(*self._taken(some), strict=True):
                kernels.accumulate_momentum(*tensors, scale, *self._factors)  # type: ignore[call-arg]  # all are there
        return outs

    def _pick(self, some: slice, draws: Sequence[Draw]) -> tuple[Tensor, Tensor]:
        momentum, nesterov = self._factors
        outs, moving, residuals, velocities, gradients, scales = self._taken(some)
        return kernels.accumulate_momentum_sampled_select(
            outs, moving, residuals, velocities, gradients, scales, momentum, nesterov, draws
        )

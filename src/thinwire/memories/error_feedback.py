"""Error feedback (Seide et al. 2014, Stich et al. 2018): what was not delivered is added to the next gradient."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, final

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.checked import checked
from thinwire.kernels import Picks
from thinwire.memories.base import Memory, Staged, State
from thinwire.payloads import Payload
from thinwire.signals import Plain, Signal

_SECOND_DRAW = 1 << 32


@final
@checked
@dataclass(kw_only=True)
class ErrorFeedback(Memory):
    """r ← r + g − delivered.

    `dtype` torch.bfloat16 halves the memory for r: 4 bytes per element instead of 8, counting both copies. Sums are
    then rounded stochastically, which keeps the mean. A codec with values=torch.bfloat16 sends them unchanged.
    """

    fields: ClassVar[frozenset[str]] = frozenset({"residual"})

    dtype: torch.dtype | None = None
    _residual: Staged = field(init=False, repr=False)
    _seeds: dict[str, int] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.dtype not in (None, torch.bfloat16):
            raise ValueError(f"dtype is {self.dtype}; expected torch.bfloat16, or None for float32 or wider")
        self._residual = Staged(self.dtype)

    def held(self, dtype: torch.dtype) -> torch.dtype:
        """Return this memory's `dtype`; if it has none, float32 or wider."""
        return self.dtype or torch.promote_types(dtype, torch.float32)

    def compensate(self, name: str, gradient: Tensor, scale: float, *, seed: int = 0) -> Signal:
        """Return r + scale · g."""
        if self._residual.continues(name):
            return self._more(name, gradient, scale, seed)
        residual, out = self._residual.open(name, gradient)
        if self.dtype is None:
            return _Sum(out, residual, gradient, scale)
        self._seeds[name] = seed
        return _RoundedSum(out, residual, gradient, scale, seed)

    def retain(self, names: Sequence[str], delivered: Payload) -> None:
        """Subtract what was delivered."""
        staged = [self._residual.staged(name) for name in names]
        if self.dtype is None:
            delivered.subtract_from(staged)
            return
        # Stochastic rounding here too: rounded to nearest, a small delivery could vanish beside a large residual and
        # be sent again for ever.
        taken = [torch.zeros_like(residual, dtype=torch.float32) for residual in staged]
        delivered.subtract_from(taken)
        for name, residual, part in zip(names, staged, taken, strict=True):
            seed = self._seeds[name] + _SECOND_DRAW
            kernels.accumulate_rounded(residual, residual, part, 1.0, seed)

    def waits(self, name: str = "") -> bool:
        """Whether anything waits for parameter `name`; without a name, for any parameter."""
        return self._residual.waits(name) if name else bool(self._residual.committed())

    def release(self, name: str, gradient: Tensor, scale: float) -> None:
        """Add r / scale to a gradient that will be sent whole; once the step is committed, nothing waits for `name`."""
        gradient.add_(self._residual.close(name).to(gradient.dtype), alpha=1 / scale)

    def _more(self, name: str, gradient: Tensor, scale: float, seed: int) -> Signal:
        """Add another part of a step's gradient to what is staged."""
        staged = self._residual.staged(name)
        if self.dtype is None:
            staged.add_(gradient, alpha=scale)
        else:
            self._seeds[name] = seed
            before = staged.clone()
            kernels.accumulate_rounded(staged, before, gradient, scale, seed)
        return Plain(staged, gradient.dtype)

    def commit(self, names: Collection[str] | None = None) -> None:
        """Keep what was staged."""
        self._residual.commit(names)

    def rollback(self, names: Collection[str] | None = None) -> None:
        """Drop what was staged."""
        self._residual.rollback(names)

    def rescale(self, factor: float) -> None:
        """Multiply the residual."""
        self._residual.rescale(factor)

    def state(self) -> State:
        """Return {name: {"residual": r}}."""
        return {name: {"residual": tensor} for name, tensor in self._residual.committed().items()}

    def restore(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Load copies of residuals."""
        self._residual.restore({name: fields["residual"] for name, fields in state.items()})


@final
class _Sum(Signal):
    """residual + scale · gradient, computed into `out`."""

    def __init__(self, out: Tensor, residual: Tensor, gradient: Tensor, scale: float) -> None:
        self._out, self._inputs = out, (residual, gradient, scale)
        self.dtype, self.numel, self.device = gradient.dtype, gradient.numel(), gradient.device

    def tensor(self) -> Tensor:
        if not self.computed:
            self.computed = True
            kernels.accumulate(self._out, *self._inputs)
        return self._out

    def sample(self, offset: int, stride: int) -> Tensor:
        residual, gradient, scale = self._inputs
        return residual[offset::stride].add(gradient[offset::stride], alpha=scale)

    def select(self, threshold: Tensor, capacity: int) -> Picks:
        self.computed = True
        return kernels.accumulate_select(self._out, *self._inputs, threshold, capacity)


@final
class _RoundedSum(Signal):
    """The same in bfloat16, rounded stochastically."""

    def __init__(self, out: Tensor, residual: Tensor, gradient: Tensor, scale: float, seed: int) -> None:
        self._arguments = (out, residual, gradient, scale, seed)
        self.dtype, self.numel, self.device = gradient.dtype, gradient.numel(), gradient.device

    def tensor(self) -> Tensor:
        if not self.computed:
            self.computed = True
            kernels.accumulate_rounded(*self._arguments)
        return self._arguments[0]

    def sample(self, offset: int, stride: int) -> Tensor:
        _, residual, gradient, scale, _ = self._arguments
        return residual[offset::stride].float().add_(gradient[offset::stride], alpha=scale)

    def select(self, threshold: Tensor, capacity: int) -> Picks:
        self.computed = True
        return kernels.accumulate_rounded_select(*self._arguments, threshold, capacity)

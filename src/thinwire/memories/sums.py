"""A parameter's residual: gradients are added, what was delivered is subtracted. It may decay from step to step."""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.kernels import Sum
from thinwire.memories.staged import Staged
from thinwire.payloads import Payload
from thinwire.signals import Plain, Signal, Signals, SummedEach

_SECOND_DRAW = 1 << 32


@final
class Sums:
    """A flat sum per parameter, staged: float32 or wider, or bfloat16, rounded stochastically, which keeps the mean."""

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        if dtype not in (None, torch.bfloat16):
            raise ValueError(f"dtype is {dtype}; expected torch.bfloat16, or None for float32 or wider")
        self.staged = Staged(dtype)
        self._dtype = dtype
        self._seeds: dict[str, int] = {}

    def held(self, dtype: torch.dtype) -> torch.dtype:
        """Return in which dtype the sum of gradients of `dtype` is held."""
        return self._dtype or torch.promote_types(dtype, torch.float32)

    def add_each(
        self,
        names: Sequence[str],
        gradients: Sequence[Tensor],
        scales: Sequence[float],
        seeds: Sequence[int],
        decays: Sequence[float],
    ) -> Signals:
        """Stage decay · x + scale · g and return it. To what is staged already, a further part of g is only added."""
        if self.staged.continue_any(names):
            return Signals([self._one(*each) for each in zip(names, gradients, scales, seeds, decays, strict=True)])
        before, outs = self.staged.open_each(names, gradients)
        fade = decays if decays != [1.0] * len(names) else None
        if self._dtype is None:
            return SummedEach(Sum(outs, before, gradients, scales, fade))
        self._seeds.update(zip(names, seeds, strict=True))
        return SummedEach(Sum(outs, before, gradients, scales, fade, seeds=list(seeds)))

    def subtract(self, names: Sequence[str], delivered: Payload) -> None:
        """Subtract what was delivered from what is staged."""
        staged = self.staged.staged_each(names)
        if self._dtype is None:
            delivered.subtract_from(staged)
            return
        # Stochastic rounding here too: rounded to nearest, a small delivery could vanish beside a large sum and be
        # sent again for ever.
        delivered.subtract_rounded(staged, [self._seeds[name] + _SECOND_DRAW for name in names])

    def release(self, name: str, gradient: Tensor, scale: float) -> None:
        """Add x / scale to a gradient that is sent uncompressed; `commit` then drops x."""
        gradient.add_(self.staged.close(name).to(gradient.dtype), alpha=1 / scale)

    def waits(self, name: str = "") -> bool:
        """Whether parameter `name`, or without a name any parameter, has a sum."""
        return self.staged.waits(name) if name else bool(self.staged.committed())

    def _one(self, name: str, gradient: Tensor, scale: float, seed: int, decay: float) -> Signal:
        if not self.staged.continues(name):
            signal: Signal = self.add_each([name], [gradient], [scale], [seed], [decay])[0]
            return signal
        x = self.staged.staged(name)
        if self._dtype is None:
            x.add_(gradient, alpha=scale)
        else:
            self._seeds[name] = seed
            kernels.accumulate(Sum([x], [x.clone()], [gradient], [scale], seeds=[seed]))
        return Plain(x, gradient.dtype)

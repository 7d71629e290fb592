"""A sum per parameter: gradients are added, what was delivered is subtracted. Error feedback is one, and may decay."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, final

import torch
from torch import Tensor
from typing_extensions import override

from thinwire import kernels
from thinwire.checked import Part, checked
from thinwire.kernels import Sum
from thinwire.kernels.parts import Ints, Vectors
from thinwire.memories.base import Memory
from thinwire.memories.staged import Staged
from thinwire.payloads import Payload
from thinwire.signals import Plain, Signal, Signals, SummedEach

_SECOND_DRAW = 1 << 32


class Summing(Memory):
    """A flat sum per parameter, staged: float32 or wider, or bfloat16, rounded stochastically, which keeps the mean."""

    releases: ClassVar[bool] = True

    dtype: torch.dtype | None
    _sum: Staged
    _seeds: dict[str, int]

    def __post_init__(self) -> None:
        if self.dtype not in (None, torch.bfloat16):
            raise ValueError(f"dtype is {self.dtype}; expected torch.bfloat16, or None for float32 or wider")
        self._sum = Staged(self.dtype)

    def held(self, dtype: torch.dtype) -> torch.dtype:
        """Return this memory's `dtype`; if it has none, float32 or wider."""
        return self.dtype or super().held(dtype)

    def add_each(
        self, names: Sequence[str], gradients: Vectors, scales: Sequence[float], seeds: Ints, decays: Sequence[float]
    ) -> Signals:
        """Stage decay · x + scale · g and return it. To what is staged already, a further part of g is only added."""
        if self._sum.continue_any(names):
            return Signals([self._one(*each) for each in zip(names, gradients, scales, seeds, decays, strict=True)])
        before, outs = self._sum.open_each(names, gradients)
        fade = decays if decays != [1.0] * len(names) else None
        if self.dtype is None:
            return SummedEach(Sum(outs, before, gradients, scales, fade))
        self._seeds.update(zip(names, seeds, strict=True))
        return SummedEach(Sum(outs, before, gradients, scales, fade, seeds=list(seeds)))

    @override
    def retain(self, names: Sequence[str], delivered: Payload) -> None:
        staged = self._sum.staged_each(names)
        if self.dtype is None:
            delivered.subtract_from(staged)
            return
        # Stochastic rounding here too: rounded to nearest, a small delivery could vanish beside a large sum and be
        # sent again for ever.
        delivered.subtract_rounded(staged, [self._seeds[name] + _SECOND_DRAW for name in names])

    @override
    def release(self, name: str, gradient: Tensor, scale: float) -> None:
        gradient.add_(self._sum.close(name).to(gradient.dtype), alpha=1 / scale)

    @override
    def waits(self, name: str = "") -> bool:
        return self._sum.waits(name) if name else bool(self._sum.committed())

    @override
    def tensors(self) -> Mapping[str, Staged]:
        return {self.residual: self._sum}

    def _one(self, name: str, gradient: Tensor, scale: float, seed: int, decay: float) -> Signal:
        if not self._sum.continue_any([name]):
            return self.add_each([name], [gradient], [scale], [seed], [decay])[0]
        x = self._sum.staged(name)
        if self.dtype is None:
            x.add_(gradient, alpha=scale)
        else:
            self._seeds[name] = seed
            kernels.accumulate(Sum([x], [x.clone()], [gradient], [scale], seeds=[seed]))
        return Plain(x, gradient.dtype)


@final
@checked
@dataclass(kw_only=True)
class ErrorFeedback(Summing):
    """Keep r ← decay · r + g − delivered (Seide et al. 2014, Stich et al. 2018).

    Args:
        decay: Below 1, the residual decays once a step, so delivered gradients and residual no longer add up to all
            gradients. SparseLoCo (Sarfi et al. 2025) uses 0.95.
        dtype: torch.bfloat16 halves the memory for r: 4 bytes per element instead of 8, counting both copies. Sums are
            then rounded stochastically, which keeps the mean. A codec with values=torch.bfloat16 sends them unchanged.
    """

    decay: Part = 1.0
    dtype: torch.dtype | None = None
    _sum: Staged = field(init=False, repr=False)
    _seeds: dict[str, int] = field(default_factory=dict, init=False, repr=False)

    @override
    def compensate_each(self, names: Sequence[str], gradients: Vectors, scale: float, seeds: Ints) -> Signals:
        count = len(names)
        return self.add_each(names, gradients, [scale] * count, seeds, [self.decay] * count)

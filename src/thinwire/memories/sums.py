"""A parameter's residual: gradients are added, what was delivered is subtracted. It may decay from step to step."""

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.kernels import Chunking, Draw, Picks
from thinwire.memories.staged import Staged
from thinwire.payloads import Payload
from thinwire.signals import Plain, Signal, Signals

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

    def add(self, name: str, gradient: Tensor, scale: float, seed: int, decay: float = 1.0) -> Signal:
        """Stage decay · x + scale · g and return it. To what is staged already, a further part of g is only added."""
        if self.staged.continues(name):
            return self._more(name, gradient, scale, seed)
        before, out = self.staged.open(name, gradient)
        if self._dtype is None:
            return _Sum(out, before, gradient, scale, decay)
        self._seeds[name] = seed
        return _RoundedSum(out, before, gradient, scale, seed, decay)

    def add_each(
        self,
        names: Sequence[str],
        gradients: Sequence[Tensor],
        scales: Sequence[float],
        seeds: Sequence[int],
        decays: Sequence[float],
    ) -> Signals:
        """`add` several."""
        if self._dtype is not None or self.staged.continue_any(names):
            some = enumerate(zip(names, gradients, scales, decays, strict=True))
            return Signals([self.add(name, g, scale, seeds[i], decay) for i, (name, g, scale, decay) in some])
        before, outs = self.staged.open_each(names, gradients)
        return _Sums(outs, before, gradients, scales, decays)

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

    def _more(self, name: str, gradient: Tensor, scale: float, seed: int) -> Signal:
        x = self.staged.staged(name)
        if self._dtype is None:
            x.add_(gradient, alpha=scale)
        else:
            self._seeds[name] = seed
            kernels.accumulate_rounded(x, x.clone(), gradient, scale, seed)
        return Plain(x, gradient.dtype)


@final
class _Sum(Signal):
    """decay · before + scale · gradient, computed into `out`."""

    def __init__(self, out: Tensor, before: Tensor, gradient: Tensor, scale: float, decay: float) -> None:
        self._out, self._inputs, self._decay = out, (before, gradient, scale), decay
        self.dtype, self.numel, self.device = gradient.dtype, gradient.numel(), gradient.device

    def tensor(self) -> Tensor:
        if not self.computed:
            self.computed = True
            if self._decay == 1:
                kernels.accumulate(self._out, *self._inputs)
            else:
                kernels.accumulate_fading(self._out, *self._inputs, self._decay)
        return self._out

    def sample(self, offset: int, stride: int) -> Tensor:
        before, gradient, scale = self._inputs
        return before[offset::stride].mul(self._decay).add_(gradient[offset::stride], alpha=scale)

    def select(self, threshold: Tensor, capacity: int) -> Picks:
        self.computed = True
        if self._decay == 1:
            return kernels.accumulate_select(self._out, *self._inputs, threshold, capacity)
        return kernels.accumulate_fading_select(self._out, *self._inputs, self._decay, threshold, capacity)

    def chunk_topk(self, chunking: Chunking) -> tuple[Tensor, Tensor]:
        if self.computed or self._decay == 1:
            return super().chunk_topk(chunking)
        self.computed = True
        return kernels.accumulate_fading_chunk_topk(self._out, *self._inputs, self._decay, chunking)


@final
class _Sums(Signals):
    """The sums of a bucket: where they go, what waits, gradients, scales and decays."""

    def __init__(
        self,
        outs: Sequence[Tensor],
        before: Sequence[Tensor],
        gradients: Sequence[Tensor],
        scales: Sequence[float],
        decays: Sequence[float],
    ) -> None:
        super().__init__((), outs, before, gradients, scales, decays)
        like = gradients[0]
        self.dtype, self.device = like.dtype, like.device
        self._fades = decays != [1.0] * len(decays)

    def _make(self, *columns: Any) -> Signal:
        return _Sum(*columns)

    def _tensors(self, some: slice, _: object = None) -> Sequence[Tensor]:
        if all(self._done[some]):
            done: Sequence[Tensor] = self._part(some)[0]
            return done
        if self._begun(some):
            return super()._tensors(some)
        outs, before, gradients, scales, decays = self._taken(some)
        if self._fades:
            for each in zip(outs, before, gradients, scales, decays, strict=True):
                kernels.accumulate_fading(*each)
        else:
            kernels.accumulate_each(outs, before, gradients, scales)
        return outs

    def _pick(self, some: slice, draws: Sequence[Draw]) -> tuple[Tensor, Tensor]:
        if self._fades:
            return super()._pick(some, draws)
        outs, before, gradients, scales, _ = self._taken(some)
        return kernels.accumulate_sampled_select(outs, before, gradients, scales, draws)

    def _chunk_topk(self, some: slice, chunkings: Sequence[Chunking]) -> tuple[Tensor, Tensor]:
        if not self._fades or self._begun(some):
            return super()._chunk_topk(some, chunkings)
        outs, before, gradients, scales, decays = self._taken(some)
        return kernels.accumulate_fading_chunk_topk_each(outs, before, gradients, scales, decays, chunkings)


@final
class _RoundedSum(Signal):
    """The same in bfloat16, rounded stochastically."""

    def __init__(self, out: Tensor, before: Tensor, gradient: Tensor, scale: float, seed: int, decay: float) -> None:
        self._arguments, self._decay = (out, before, gradient, scale, seed), decay
        self.dtype, self.numel, self.device = gradient.dtype, gradient.numel(), gradient.device

    def tensor(self) -> Tensor:
        if not self.computed:
            self.computed = True
            kernels.accumulate_rounded(*self._arguments, self._decay)
        return self._arguments[0]

    def sample(self, offset: int, stride: int) -> Tensor:
        _, before, gradient, scale, _ = self._arguments
        return before[offset::stride].float().mul_(self._decay).add_(gradient[offset::stride], alpha=scale)

    def select(self, threshold: Tensor, capacity: int) -> Picks:
        self.computed = True
        return kernels.accumulate_rounded_select(*self._arguments, threshold, capacity, self._decay)

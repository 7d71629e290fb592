"""Error feedback: what was not delivered is added to the next gradient."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, final

import torch
from torch import Tensor
from typing_extensions import override

from thinwire.checked import Part, checked
from thinwire.memories.base import Memory
from thinwire.memories.staged import Staged
from thinwire.memories.sums import Sums
from thinwire.payloads import Payload
from thinwire.signals import Signals


@final
@checked
@dataclass(kw_only=True)
class ErrorFeedback(Memory):
    """Keep r ← decay · r + g − delivered (Seide et al. 2014, Stich et al. 2018).

    Args:
        decay: Below 1, the residual decays once a step, so delivered gradients and residual no longer add up to all
            gradients. SparseLoCo (Sarfi et al. 2025) uses 0.95.
        dtype: torch.bfloat16 halves the memory for r: 4 bytes per element instead of 8, counting both copies. Sums are
            then rounded stochastically, which keeps the mean. A codec with values=torch.bfloat16 sends them unchanged.
    """

    fields: ClassVar[frozenset[str]] = frozenset({"residual"})
    releases: ClassVar[bool] = True

    decay: Part = 1.0
    dtype: torch.dtype | None = None
    _residual: Sums = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._residual = Sums(self.dtype)

    def held(self, dtype: torch.dtype) -> torch.dtype:
        """Return this memory's `dtype`; if it has none, float32 or wider."""
        return self._residual.held(dtype)

    @override
    def compensate_each(
        self, names: Sequence[str], gradients: Sequence[Tensor], scale: float, seeds: Sequence[int]
    ) -> Signals:
        count = len(names)
        return self._residual.add_each(names, gradients, [scale] * count, seeds, [self.decay] * count)

    @override
    def retain(self, names: Sequence[str], delivered: Payload) -> None:
        self._residual.subtract(names, delivered)

    @override
    def waits(self, name: str = "") -> bool:
        return self._residual.waits(name)

    @override
    def release(self, name: str, gradient: Tensor, scale: float) -> None:
        self._residual.release(name, gradient, scale)

    @override
    def tensors(self) -> Mapping[str, Staged]:
        return {"residual": self._residual.staged}

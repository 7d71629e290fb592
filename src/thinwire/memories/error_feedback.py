"""Error feedback: what was not delivered is added to the next gradient."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, final

import torch
from typing_extensions import override

from thinwire.checked import Part, checked
from thinwire.kernels.parts import Ints, Vectors
from thinwire.memories.staged import Staged
from thinwire.memories.sums import Summing
from thinwire.signals import Signals


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

    fields: ClassVar[frozenset[str]] = frozenset({"residual"})

    decay: Part = 1.0
    dtype: torch.dtype | None = None
    _sum: Staged = field(init=False, repr=False)
    _seeds: dict[str, int] = field(default_factory=dict, init=False, repr=False)

    @override
    def compensate_each(self, names: Sequence[str], gradients: Vectors, scale: float, seeds: Ints) -> Signals:
        count = len(names)
        return self.add_each(names, gradients, [scale] * count, seeds, [self.decay] * count)

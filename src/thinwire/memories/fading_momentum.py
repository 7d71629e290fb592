"""Momentum as the memory: what was not delivered fades, as momentum does."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self, final

import torch
from typing_extensions import override

from thinwire.checked import Fraction, Positive, checked
from thinwire.kernels.parts import Ints, Vectors
from thinwire.memories.applied_momentum import AppliedMomentum
from thinwire.memories.clipping import limited_each
from thinwire.memories.error_feedback import Summing
from thinwire.memories.staged import Staged
from thinwire.signals import Signals


@final
@checked
@dataclass(kw_only=True)
class FadingMomentum(Summing, AppliedMomentum):
    """Keep M ← β·M + g − delivered (DeMo, Peng et al. 2024).

    Momentum is applied here, on each rank and before anything is chosen, so the optimizer itself must have none:
    `attach(..., optimizer=optimizer)` moves it here, from AdamW and from SGD. M, which is the residual, fades once per
    step: any further part of a step's gradient is added as it is. So, unlike with `ErrorFeedback`, delivered gradients
    and residual do not add up to all gradients.

    Args:
        decay: β; None takes each parameter's from the optimizer.
        dtype: torch.bfloat16 halves the memory for M: 4 bytes per element instead of 8, counting both copies. Sums are
            then rounded stochastically, which keeps the mean.
        clip_norm: Clips each rank's gradient, per tensor and without its loss scale, to a norm of clip_norm/√world_size
            before it is added (local gradient clipping, Lin et al. 2018). Clipping what arrived is too late: a large
            gradient is in M by then, and outweighs those that follow until it has faded.
    """

    fields: ClassVar[frozenset[str]] = frozenset({"momentum"})

    decay: Fraction | None = None
    dtype: torch.dtype | None = None
    clip_norm: Positive | None = None
    _sum: Staged = field(init=False, repr=False)
    _seeds: dict[str, int] = field(default_factory=dict, init=False, repr=False)
    _adopted: dict[str, float] = field(default_factory=dict, init=False, repr=False)

    @property
    @override
    def own_decay(self) -> float | None:
        return self.decay

    @override
    def momenta(self) -> Staged:
        return self._sum

    def blank(self) -> Self:
        """Return an empty memory with the same settings, and decay 0 if none is given."""
        return replace(self, decay=self.decay or 0.0)

    def compensate_each(self, names: Sequence[str], gradients: Vectors, scale: float, seeds: Ints) -> Signals:
        """Return β·M + scale · g of each, with g clipped.

        Raises:
            RuntimeError: When no decay is known.
        """
        clipped = limited_each(gradients, scale, self.clip_norm, self._loss_scale)
        return self.add_each(names, *clipped, seeds, list(map(self._decay, names)))

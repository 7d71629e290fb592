"""Memories that apply momentum in the optimizer's place; in one, what was not delivered fades as momentum does."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self, final

import torch
from torch import Tensor
from typing_extensions import override

from thinwire.checked import Fraction, Positive, checked
from thinwire.kernels.parts import Ints, Vectors
from thinwire.memories.base import Memory, limited_each
from thinwire.memories.error_feedback import Summing
from thinwire.memories.staged import Staged
from thinwire.signals import Signals


class AppliedMomentum(Memory):
    """Applies the optimizer's momentum, before anything is chosen; it is "momentum" in `state`.

    `attach(..., optimizer=optimizer)` moves momentum out of the optimizer into it, and back. On each rank it is that
    rank's share: the sum over ranks is the momentum of the mean gradient.
    """

    own: ClassVar[str] = "decay"
    """The setting that is `own_decay`."""

    _adopted: dict[str, float]

    @property
    def own_decay(self) -> float | None:
        """The decay β of momentum; None if it is the optimizer's, set by `adopt`."""
        found: float | None = getattr(self, self.own)
        return found

    @override
    def blank(self) -> Self:
        return replace(self, **{self.own: self.own_decay or 0.0})  # type: ignore[type-var]  # each is a dataclass

    def adopt(self, decays: Mapping[str, float]) -> None:
        """Use these decays, by parameter, where the memory has none of its own."""
        self._adopted = dict(decays)

    def receive(self, name: str, momentum: Tensor) -> None:
        """Add an optimizer's momentum (flat) to that of parameter `name`.

        If a step has begun, it decays as the momentum already there did.
        """
        continues = self.begun(name)
        committed, staged = self.tensors()["momentum"].open(name, momentum)
        committed.add_(momentum)
        if continues:
            staged.add_(momentum, alpha=self._decay(name))
        else:
            self.rollback([name])

    def begun(self, name: str) -> bool:
        """Whether a step has begun for parameter `name`: something is staged."""
        return self.tensors()["momentum"].continue_any([name])

    def drop(self, names: Collection[str]) -> None:
        """Forget what is held for `names`, whose momentum is elsewhere now. No step may have begun for them."""
        for held in self.tensors().values():
            held.drop(names)

    def _decay(self, name: str) -> float:
        found = self._adopted.get(name) if self.own_decay is None else self.own_decay
        if found is None:
            raise RuntimeError(
                f"the decay of {name!r} is not known: attach with optimizer=, or give the recipe's memory its own"
            )
        return found


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

    residual: ClassVar[str] = "momentum"

    decay: Fraction | None = None
    dtype: torch.dtype | None = None
    clip_norm: Positive | None = None
    _sum: Staged = field(init=False, repr=False)
    _seeds: dict[str, int] = field(default_factory=dict, init=False, repr=False)
    _adopted: dict[str, float] = field(default_factory=dict, init=False, repr=False)

    def compensate_each(self, names: Sequence[str], gradients: Vectors, scale: float, seeds: Ints) -> Signals:
        """Return β·M + scale · g of each, with g clipped.

        Raises:
            RuntimeError: When no decay is known.
        """
        clipped = limited_each(gradients, scale, self.clip_norm, self._loss_scale)
        return self.add_each(names, *clipped, seeds, list(map(self._decay, names)))

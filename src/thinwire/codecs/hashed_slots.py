"""DRAGONN's selection (Wang et al. 2022, Alg. 1)."""

import math
from dataclasses import dataclass
from typing import final

import torch

from thinwire import kernels
from thinwire.codecs.base import Codec, check_density, kept
from thinwire.codecs.thresholding import candidates, filled
from thinwire.kernels import gather
from thinwire.payloads import Narrow, Sparse, narrowed
from thinwire.schedules import Schedule
from thinwire.signals import Signal


@final
@dataclass(frozen=True, kw_only=True)
class HashedSlots(Codec):
    """Write every pick into slot h(index) of m = round(density · d) slots; where two meet, the larger magnitude stays.

    The threshold aims at `surplus` · m picks. Of n picks m·(1 − (1 − 1/m)ⁿ) slots fill: 63 % at surplus 1, 86 % at 2.
    A pick that lost its slot was not sent. h is drawn anew for each seed, and one to one with the rest of the index, so
    that the number of a slot tells part of the index and only the rest travels; an empty slot travels as none.
    The paper keeps whichever was written last, which delays large elements at random; with momentum correction
    it made training unstable (docs/measurements).
    """

    density: float | Schedule
    surplus: float = 2.0
    values: Narrow = None

    def __post_init__(self) -> None:
        check_density(self.density)
        if self.surplus <= 0:
            raise ValueError(f"surplus is {self.surplus}; expected more than 0")

    def encode_signal(self, signal: Signal, *, seed: int = 0) -> Sparse:
        """Return m slots; NaN counts as largest, so that a collision does not hide it."""
        m = kept(self.density, signal.numel)
        picks = candidates(signal, min(signal.numel, math.ceil(self.surplus * m)), seed)
        magnitudes = picks.values.abs().to(torch.float32).view(torch.int32)
        slots = kernels.hashed_slots(picks.indices, magnitudes, m, signal.numel, seed)
        values, coded = narrowed(gather(signal.tensor(), slots), self.values, signal.dtype, seed, signal.share)
        indices = filled(slots, signal.numel)
        return Sparse(indices=indices, values=values, numel=signal.numel, coded=coded, seeds=(seed,))

"""DRAGONN's hashed slots (Wang et al. 2022, Alg. 1).

The slot of an index is `slot_of` in kernels/hashing/reference.py.
"""

import math
from dataclasses import dataclass
from typing import final

import torch

from thinwire import kernels
from thinwire.checked import Positive, checked
from thinwire.codecs.base import Codec, kept
from thinwire.codecs.thresholding import candidates, filled
from thinwire.kernels import gather
from thinwire.payloads import Narrow, Sparse, narrowed
from thinwire.schedules import Density
from thinwire.signals import Signal


@final
@checked
@dataclass(frozen=True, kw_only=True)
class HashedSlots(Codec):
    """Write each large element into slot h(index) of m = round(density · d) slots, and send the slots. No sort.

    Where two elements meet in a slot, the larger magnitude stays; the other is not sent. A threshold picks about
    `surplus` · m elements. n picks fill m·(1 − (1 − 1/m)ⁿ) slots: 63 % at surplus 1, 86 % at 2.

    Which slot is it? `slot_of` in kernels/hashing/reference.py says. h is new for each seed and can be undone: slot and
    quotient together give the index back. So the slot's number tells part of the index, and only the quotient travels.
    An empty slot has its own code.

    The paper keeps whichever element was written last. That delays large elements at random, and with momentum
    correction it made training unstable (docs/explanation/decisions.md). Raises ValueError for a density outside (0, 1]
    or a surplus of 0 or less.
    """

    density: Density
    surplus: Positive = 2.0
    values: Narrow = None

    def encode_signal(self, signal: Signal, *, seed: int = 0) -> Sparse:
        """Return m slots. NaN counts as largest, so a collision cannot hide it."""
        m = kept(self.density, signal.numel)
        picks = candidates(signal, min(signal.numel, math.ceil(self.surplus * m)), seed)
        magnitudes = picks.values.abs().to(torch.float32).view(torch.int32)
        slots = kernels.hashed_slots(picks.indices, magnitudes, m, signal.numel, seed)
        values, coded = narrowed(gather(signal.tensor(), slots), self.values, signal.dtype, seed, signal.share)
        indices = filled(slots, signal.numel)
        return Sparse(indices=indices, values=values, numel=signal.numel, coded=coded, seeds=(seed,))

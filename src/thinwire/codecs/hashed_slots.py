"""DRAGONN's hashed slots: the slot of an index is `slot_of` in kernels/hashing/reference.py."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from thinwire.checked import Positive, checked
from thinwire.codecs.base import BucketCodec, fit, kept, side_by_side
from thinwire.codecs.thresholding import PICKS_IN_SAMPLE, draw, sample_bytes
from thinwire.kernels import Draw
from thinwire.kernels.parts import Cut
from thinwire.kernels.replay import changing
from thinwire.payloads import Narrow, Scratch, Sparse
from thinwire.schedules import Density
from thinwire.signals import Signals


@final
@checked
@dataclass(frozen=True, kw_only=True)
class HashedSlots(BucketCodec):
    """Write large elements into slot h(index) of m = round(density · d) slots (Wang et al. 2022, Algorithm 1).

    Where two elements meet in a slot, the larger magnitude stays; the other is not sent. The paper keeps whichever was
    written last. That delays large elements at random, and with momentum correction it made training unstable
    (docs/explanation/decisions.md).

    h is new for each seed and invertible: slot and quotient together give the index back, so only the quotient travels.
    An empty slot has its own code.

    Args:
        density: Slots divided by the number of elements.
        surplus: A threshold picks about surplus · m elements. n picks fill m·(1 − (1 − 1/m)ⁿ) slots on average: 63 % of
            them with surplus 1, 86 % with surplus 2.
        values: How values travel: in the gradient's dtype (None), in another dtype, or in a format of a few bits.
    """

    density: Density
    surplus: Positive = 2.0
    values: Narrow = None

    @property
    def scratch(self) -> Scratch:
        """A sample, about twice as many candidates as slots, and the slots."""
        return Scratch(value=240, alone=lambda numel: sample_bytes(numel, self._picks(kept(self.density, numel))))

    def _picks(self, slots: int) -> int:
        return math.ceil(self.surplus * slots)

    def encode_signals(self, signals: Signals, *, seeds: Sequence[int], cut: Cut, numel: int) -> Sparse:
        """Return m slots. NaN counts as largest, so a collision cannot hide it."""
        slots = [kept(self.density, length) for length in signals.lengths]
        wanted = [min(length, self._picks(m)) for length, m in zip(signals.lengths, slots, strict=True)]

        def drawn() -> list[Draw]:
            each = zip(signals.lengths, wanted, seeds, strict=True)
            return [draw(length, n, 2 * n + PICKS_IN_SAMPLE, seed) for length, n, seed in each]

        draws = changing(drawn, len(slots))
        found = signals.slots(draws, slots, seeds, cut.regions, fit(signals, self.values))
        return side_by_side(signals, found, slots, self.values, seeds=seeds, cut=cut, numel=numel, slots=True)

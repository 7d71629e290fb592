"""A threshold that is measured now and then."""

from dataclasses import dataclass
from typing import final

from torch import Tensor
from typing_extensions import override

from thinwire.checked import Multiple, Number, checked
from thinwire.codecs.thresholding import Thresholded, kth_largest
from thinwire.payloads import Narrow
from thinwire.schedules import Density, Every, Schedule
from thinwire.signals import Signal


@final
@checked
@dataclass(frozen=True, kw_only=True)
class KeptThreshold(Thresholded):
    """Send all `|x| ≥ τ`, with τ the k-th largest magnitude of an earlier step (Gupta et al. 2021, Algorithm 1).

    Args:
        density: The share k/d of elements that τ aims at.
        refresh: A function of the step: τ is measured where it is not 0. In between, the memory's note keeps it; with a
            memory that keeps no notes, it is measured at every step.
        bound: The payload has room for ⌈bound · k⌉ elements. If more reach τ, the largest are sent and the others stay
            in the residual. If fewer do, the rest is padding.
        values: How values travel: in the gradient's dtype (None), in another dtype, or in a format of a few bits.
    """

    density: Density
    refresh: Number | Schedule = Every(steps=1000)  # noqa: RUF009 - frozen
    bound: Multiple = 1.5
    values: Narrow = None

    @override
    def threshold(self, signal: Signal, k: int) -> Tensor:
        known = None if signal.note is None or self.refresh else signal.note.read()
        if known is not None:
            return known[0]
        threshold = kth_largest(signal.tensor(), k)
        if signal.note is not None:
            signal.note.write(threshold.view(1))
        return threshold

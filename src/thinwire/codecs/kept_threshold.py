"""A threshold that is measured now and then."""

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from thinwire.checked import Multiple, Number, checked
from thinwire.codecs.base import Codec, kept
from thinwire.codecs.thresholding import kth_largest, near, room, strongest
from thinwire.payloads import Narrow, Scratch, Sparse
from thinwire.schedules import Density, Every, Schedule
from thinwire.signals import Signal


@final
@checked
@dataclass(frozen=True, kw_only=True)
class KeptThreshold(Codec):
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

    # what finds τ, and candidates, of which the payload is a part: several times as many as are sent
    scratch: ClassVar[Scratch] = Scratch(element=0.2, value=135, arriving=13)

    def encode_signal(self, signal: Signal, *, seed: int = 0) -> Sparse:
        """Return ⌈bound · k⌉ elements, padding included."""
        k = kept(self.density, signal.numel)
        capacity = room(self.bound, k, signal.numel)
        picks = near(signal, self._threshold(signal, k), capacity)
        return strongest(signal, picks, capacity, self.values, seed)

    def _threshold(self, signal: Signal, k: int) -> Tensor:
        known = None if signal.note is None or self.refresh else signal.note.read()
        if known is not None:
            return known[0]
        threshold = kth_largest(signal.tensor(), k) if k else torch.zeros((), device=signal.device)
        if signal.note is not None:
            signal.note.write(threshold.view(1))
        return threshold

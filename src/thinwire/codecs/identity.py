"""No compression: send every value."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from typing_extensions import override

from thinwire.codecs.base import BucketCodec
from thinwire.kernels.parts import Cut
from thinwire.payloads import Dense, Scratch, narrowed
from thinwire.signals import Signals


@final
@dataclass(frozen=True, kw_only=True)
class Identity(BucketCodec):
    """Send every value as it is."""

    scratch: ClassVar[Scratch] = Scratch()  # nothing: the gradient is the payload
    elementwise: ClassVar[bool] = True

    @override
    def encode_signals(self, signals: Signals, *, seeds: Sequence[int], cut: Cut, numel: int) -> Dense:
        dtype, share = signals.dtype, signals.share  # one by one: what that takes is the longest's
        parts = [narrowed(x, None, dtype, seed, share)[0] for x, seed in zip(signals.tensors(), seeds, strict=True)]
        values = parts[0] if len(parts) == 1 else torch.cat(parts)
        return Dense(values=values, numel=numel, regions=cut.regions)

"""No compression: send every value."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

from typing_extensions import override

from thinwire.codecs.base import BucketCodec
from thinwire.kernels.parts import Cut
from thinwire.payloads import Dense, Scratch
from thinwire.payloads.numbers import joined_as
from thinwire.signals import Signals


@final
@dataclass(frozen=True, kw_only=True)
class Identity(BucketCodec):
    """Send every value as it is."""

    scratch: ClassVar[Scratch] = Scratch()  # nothing: the gradient is the payload
    elementwise: ClassVar[bool] = True

    @override
    def encode_signals(self, signals: Signals, *, seeds: Sequence[int], cut: Cut, numel: int) -> Dense:
        xs, factor = signals.multiples()
        values = joined_as(xs, signals.dtype, signals.share, factor)
        return Dense(values=values, numel=numel, regions=cut.regions)

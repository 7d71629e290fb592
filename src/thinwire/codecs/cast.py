"""Send every value, in fewer bits."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch

from thinwire.checked import checked
from thinwire.codecs.base import BucketCodec
from thinwire.formats import Format
from thinwire.kernels.parts import Cut, together
from thinwire.payloads import Dense, Scratch
from thinwire.payloads.numbers import coded_each, joined_as
from thinwire.signals import Signals


@final
@checked
@dataclass(frozen=True, kw_only=True)
class Cast(BucketCodec):
    """Send every value, in fewer bits.

    Args:
        values: float16 or bfloat16, rounded to nearest, or a format of a few bits. A value beyond float16's 65504 is
            clamped if the memory keeps the remainder (`Signal.share`), and otherwise becomes infinite.
            Formats scale each tensor on its own; their codes cannot be added, so gather them.

    Raises:
        ValueError: For other dtypes.
    """

    values: torch.dtype | Format = torch.float16

    def __post_init__(self) -> None:
        if not isinstance(self.values, Format) and self.values not in (torch.float16, torch.bfloat16):
            raise ValueError(
                f"values is {self.values}; expected torch.float16, torch.bfloat16 or one of thinwire.formats"
            )

    @property
    def elementwise(self) -> bool:
        """True unless elements share a scale."""
        return not isinstance(self.values, Format)

    @property
    def scratch(self) -> Scratch:
        """The payload: narrower values, or codes and the numbers that they stand for."""
        return Scratch(value=10.5) if isinstance(self.values, Format) else Scratch(value=2)

    def encode_signals(self, signals: Signals, *, seeds: Sequence[int], cut: Cut, numel: int) -> Dense:
        """Encode each vector. A format encodes all in one call."""
        xs, factor = signals.multiples()
        if not isinstance(self.values, Format):  # joined when they are narrow
            return Dense(values=joined_as(xs, self.values, signals.share, factor), numel=numel, regions=cut.regions)
        values, coded = coded_each(together(xs), self.values, signals.dtype, seeds, factor)
        return Dense(values=values, numel=numel, regions=cut.regions, coded=coded)

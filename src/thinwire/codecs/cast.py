"""Fewer bits per value."""

from dataclasses import dataclass
from typing import final

import torch

from thinwire.codecs.base import Codec
from thinwire.formats import Format
from thinwire.payloads import Dense, narrowed
from thinwire.signals import Signal


@final
@dataclass(frozen=True, kw_only=True)
class Cast(Codec):
    """Send every value in `values`: float16 or bfloat16, rounded to nearest, or a format of a few bits.

    Beyond float16's 65504 a value is cut where a memory keeps the rest (`Signal.share`); elsewhere it becomes infinite
    and so is seen, like any overflow. bfloat16 has float32's range.
    Formats scale each tensor on its own, and their codes cannot be added on the way: gather them.
    """

    values: torch.dtype | Format = torch.float16

    def __post_init__(self) -> None:
        if not isinstance(self.values, Format) and self.values not in (torch.float16, torch.bfloat16):
            raise ValueError(
                f"values is {self.values}; expected torch.float16, torch.bfloat16 or a thinwire.formats one"
            )

    @property
    def elementwise(self) -> bool:
        """Whether no scale is shared."""
        return not isinstance(self.values, Format)

    def encode_signal(self, signal: Signal, *, seed: int = 0) -> Dense:
        """Return all values, narrowed."""
        values, coded = narrowed(signal.tensor(), self.values, signal.dtype, seed, signal.share)
        return Dense(values=values, coded=coded)

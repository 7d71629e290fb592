"""Fewer bits per value."""

from dataclasses import dataclass
from typing import ClassVar, final

import torch

from thinwire.codecs.base import Codec
from thinwire.payloads import Dense
from thinwire.signals import Signal


@final
@dataclass(frozen=True, kw_only=True)
class Cast(Codec):
    """Send every value as float16 or bfloat16, rounded to nearest.

    A value beyond float16's 65504 becomes infinite and so is seen, like any overflow; bfloat16 has float32's range.
    """

    values: torch.dtype = torch.float16
    elementwise: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.values not in (torch.float16, torch.bfloat16):
            raise ValueError(f"values is {self.values}; expected torch.float16 or torch.bfloat16")

    def encode_signal(self, signal: Signal, *, seed: int = 0) -> Dense:
        """Return all values in the narrow dtype."""
        return Dense(values=signal.tensor().to(self.values))

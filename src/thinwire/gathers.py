"""Gathers: how the parameters of a sharded model travel, where FSDP2 gathers them before it computes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, final

import torch
from torch import Tensor

from thinwire.checked import Width, checked
from thinwire.formats import Levels
from thinwire.payloads import Dense
from thinwire.payloads.numbers import narrowed_each

__all__ = ["Differences", "Gathers", "Lossless"]


@final
@checked
@dataclass(frozen=True, kw_only=True)
class Differences:
    """Send the difference between parameters and a copy of them that all ranks keep, in a few bits (SDP4Bit, 2024).

    Each rank adds what it receives to its copy, and computes with that. What rounding left out is part of the next
    difference. Until parameters change nothing is sent: gathers in backward, accumulation and evaluation cost no bytes.
    The copy takes 2 bytes a parameter of the whole model on every rank if bfloat16 is gathered, and 4 for float32.

    Args:
        bits: Bits of a value, sign included. With 16, bfloat16 and float16 parameters travel exactly;
            those of other dtypes as differences in bfloat16.
        group_size: Values that share a scale, their largest magnitude.
        host: Keep the copy in main memory, pinned, rather than on the GPU.
    """

    bits: Literal[2, 3, 4, 8, 16] = 4
    group_size: Width = 128
    host: bool = False

    def exact(self, dtype: torch.dtype) -> bool:
        """Whether parameters of this dtype travel as they are whenever they have changed."""
        return self.bits >= 8 * dtype.itemsize

    def encode(self, moved: Tensor, runs: Sequence[int]) -> Dense:
        """Encode the differences of several parameters.

        Args:
            moved: How far they have moved, flat, one parameter after another.
            runs: Their lengths.

        Returns:
            A payload of codes, or with 16 bits of bfloat16.
        """
        how = (
            torch.bfloat16
            if self.bits == 16
            else Levels(bits=self.bits, norm="max", group_size=self.group_size, rounding="nearest")
        )
        values, coded = narrowed_each(moved, runs, how, moved.dtype, [0] * len(runs))
        return Dense(values=values, coded=coded)


@final
@dataclass(frozen=True, kw_only=True)
class Lossless:
    """Code the exponents of parameters without loss, and send the rest as it is (ZipNN, Hershcovitch et al. 2024).

    Exponents of weights carry two or three bits of information, not eight. bfloat16 shrinks to about 0.7 of its bytes,
    float32 to 0.85. Other dtypes travel as they are. It keeps no copy, so every gather sends. On a GPU the host waits
    for the length of what is sent.
    """


Gathers = Differences | Lossless
"""What `thinwire.scatter` takes as `gathers`."""

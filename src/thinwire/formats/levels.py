"""Uniform levels: with stochastic rounding, QSGD."""

import math
from dataclasses import dataclass
from typing import Literal, final

import torch
from torch import Tensor
from typing_extensions import override

from thinwire.checked import checked
from thinwire.formats.base import Bits, GroupSize, Scaled
from thinwire.kernels import Groups, Norm, UniformGrid

_ORDERS = {"l2": 2.0, "max": math.inf}


@final
@checked
@dataclass(frozen=True, kw_only=True)
class Levels(Scaled):
    """Round x / norm to zero or one of s levels of either sign: stochastically, as in QSGD (Alistarh et al. 2017).

    s = 2^(bits-1) - 1, and code c stands for (c - s) / s of the norm. A norm beyond float32's range counts as not
    finite.

    Args:
        bits: Bits of each value, sign included.
        norm: What the scale is: the group's ℓ2 norm, or its largest magnitude.
        group_size: Values that share a norm.
        rounding: "nearest" halves the largest error, and is biased: keep the error, and send it later.
    """

    bits: Bits = 4
    norm: Literal["l2", "max"] = "l2"
    group_size: GroupSize = 512
    rounding: Literal["stochastic", "nearest"] = "stochastic"

    @override
    def scaling(self, groups: Groups, device: torch.device) -> Norm:
        return Norm(_ORDERS[self.norm], None, 1.0)

    def table(self) -> Tensor:
        """Return -1 to 1 in steps of 1/s, then NaN for the unused code."""
        codes = torch.arange(2 * self._levels + 1, dtype=torch.float32)
        return torch.cat(((codes - self._levels) / self._levels, torch.tensor([torch.nan])))

    @property
    @override
    def how(self) -> UniformGrid:
        return UniformGrid(self._levels, self.rounding == "nearest")

    @property
    def _levels(self) -> int:
        return int(2 ** (self.bits - 1)) - 1

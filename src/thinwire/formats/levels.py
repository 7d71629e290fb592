"""Uniform levels: with stochastic rounding, QSGD."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, final

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.checked import checked
from thinwire.formats.base import Bits, Format, GroupSize, flat32
from thinwire.kernels import UniformGrid

_ORDERS = {"l2": 2.0, "max": math.inf}


@final
@checked
@dataclass(frozen=True, kw_only=True)
class Levels(Format):
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

    def encode_each(
        self, x: Tensor, runs: tuple[int, ...], *, seeds: Sequence[int], out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return codes 0..2s and the norms, with 1 for a group of zeros."""
        x, groups = flat32(x), self.groups(runs)
        scales = kernels.group_scales(x, groups, _ORDERS[self.norm], None, 1.0)
        grid = UniformGrid(self._levels, self.rounding == "nearest")
        return self.codes(x, scales, groups, grid, seeds, out), scales

    def table(self) -> Tensor:
        """Return -1 to 1 in steps of 1/s, then NaN for the unused code."""
        codes = torch.arange(2 * self._levels + 1, dtype=torch.float32)
        return torch.cat(((codes - self._levels) / self._levels, torch.tensor([torch.nan])))

    @property
    def _levels(self) -> int:
        return int(2 ** (self.bits - 1)) - 1

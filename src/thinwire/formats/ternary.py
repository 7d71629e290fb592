"""Minus one, zero or one, scaled: TernGrad."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.checked import Positive, checked
from thinwire.formats.base import Format, GroupSize, flat32, widths


@final
@checked
@dataclass(frozen=True, kw_only=True)
class Ternary(Format):
    """Send ±scale with probability `|x|` / scale, otherwise zero (TernGrad, Wen et al. 2017).

    Args:
        clip: First limits magnitudes to clip · σ (2.5 in the paper). That lowers the variance and is biased. σ is taken
            about zero, so that equal values are not cut to nothing.
        group_size: Values that share a scale, the largest magnitude.
    """

    clip: Positive | None = None
    group_size: GroupSize = None
    bits: int = field(default=2, init=False)

    def encode_each(
        self, x: Tensor, runs: tuple[int, ...], *, seeds: Sequence[int], out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return codes 0 (zero), 1 (plus) or 2 (minus), and the scales, with 0 for a group of zeros."""
        x, groups = flat32(x), self.groups(runs)
        counts = None if self.clip is None else widths(groups, x.device)
        scales = kernels.group_scales(x, groups, math.inf, counts, 0.0, self.clip)
        return self.codes(x, scales, groups, "ternary", seeds, out), scales

    def table(self) -> Tensor:
        """Return 0, 1, -1 and NaN."""
        return torch.tensor([0.0, 1.0, -1.0, torch.nan])

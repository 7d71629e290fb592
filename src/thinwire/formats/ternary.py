"""Minus one, zero or one, scaled: TernGrad."""

import math
from dataclasses import dataclass, field
from typing import ClassVar, final

import torch
from torch import Tensor
from typing_extensions import override

from thinwire.checked import Positive, checked
from thinwire.formats.base import GroupSize, Scaled, widths
from thinwire.kernels import Groups, Norm
from thinwire.kernels.codes.reference import How


@final
@checked
@dataclass(frozen=True, kw_only=True)
class Ternary(Scaled):
    """Send ±scale with probability `|x|` / scale, otherwise zero (TernGrad, Wen et al. 2017).

    Args:
        clip: First limits magnitudes to clip · σ (2.5 in the paper). That lowers the variance and is biased. σ is taken
            about zero, so that equal values are not cut to nothing.
        group_size: Values that share a scale, the largest magnitude.
    """

    clip: Positive | None = None
    group_size: GroupSize = None
    bits: int = field(default=2, init=False)
    how: ClassVar[How] = "ternary"

    @override
    def scaling(self, groups: Groups, device: torch.device) -> Norm:
        return Norm(math.inf, None if self.clip is None else widths(groups, device), 0.0, self.clip)

    def table(self) -> Tensor:
        """Return 0, 1, -1 and NaN."""
        return torch.tensor([0.0, 1.0, -1.0, torch.nan])

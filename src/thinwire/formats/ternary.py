"""Minus one, zero or one, scaled: TernGrad."""

import math
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.formats.base import Format, check_group, flat32, norms, peaks, widths


@final
@dataclass(frozen=True, kw_only=True)
class Ternary(Format):
    """TernGrad (Wen et al. 2017): ±scale with probability |x| / scale, otherwise zero.

    The scale is the group's largest magnitude. `clip` first limits magnitudes to clip · σ (2.5 in the paper). That
    lowers the variance and is biased. σ is taken about zero, so that equal values are not cut to nothing. Raises
    ValueError unless `clip` is positive and finite, or None.
    """

    clip: float | None = None
    group: int | None = None
    bits: int = field(default=2, init=False)

    def __post_init__(self) -> None:
        check_group(self.group)
        if self.clip is not None and not 0 < self.clip < math.inf:
            raise ValueError(f"clip is {self.clip}; expected a positive number of standard deviations, or None")

    @property
    def unbiased(self) -> bool:
        """Yes, unless it clips."""
        return self.clip is None

    def encode(self, x: Tensor, *, seed: int) -> tuple[Tensor, Tensor]:
        """Return codes 0 (zero), 1 (plus) or 2 (minus), and the scales, with 0 for a group of zeros."""
        x = flat32(x)
        scales = peaks(x, self.group)
        if self.clip is not None:
            deviations = norms(x, self.group, 2.0) / widths(x, self.group).sqrt()
            scales = torch.minimum(scales, (self.clip * deviations).to(torch.float32))
        codes = self.empty_codes(x)
        kernels.ternary_encode(codes, x, scales, self.width(x.numel()), seed)
        return codes, scales

    def table(self) -> Tensor:
        """Return 0, 1, -1 and NaN."""
        return torch.tensor([0.0, 1.0, -1.0, torch.nan])

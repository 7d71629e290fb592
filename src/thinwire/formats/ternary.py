"""Minus one, zero or one, scaled: TernGrad."""

from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.checked import Positive, checked
from thinwire.formats.base import Format, GroupSize, flat32, norms, peaks, widths


@final
@checked
@dataclass(frozen=True, kw_only=True)
class Ternary(Format):
    """TernGrad (Wen et al. 2017): ±scale with probability |x| / scale, otherwise zero.

    The scale is the group's largest magnitude. `clip` first limits magnitudes to clip · σ (2.5 in the paper). That
    lowers the variance and is biased. σ is taken about zero, so that equal values are not cut to nothing. Raises
    ValueError unless `clip` is positive and finite, or None.
    """

    clip: Positive | None = None
    group_size: GroupSize = None
    bits: int = field(default=2, init=False)

    @property
    def unbiased(self) -> bool:
        """Yes, unless it clips."""
        return self.clip is None

    def encode(self, x: Tensor, *, seed: int) -> tuple[Tensor, Tensor]:
        """Return codes 0 (zero), 1 (plus) or 2 (minus), and the scales, with 0 for a group of zeros."""
        x = flat32(x)
        scales = peaks(x, self.group_size)
        if self.clip is not None:
            deviations = norms(x, self.group_size, 2.0) / widths(x, self.group_size).sqrt()
            scales = torch.minimum(scales, (self.clip * deviations).to(torch.float32))
        codes = self.empty_codes(x)
        kernels.ternary_encode(codes, x, scales, self.width(x.numel()), seed)
        return codes, scales

    def table(self) -> Tensor:
        """Return 0, 1, -1 and NaN."""
        return torch.tensor([0.0, 1.0, -1.0, torch.nan])

"""A sign, and one of a few magnitudes: two bits and more, with error feedback."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import final

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.checked import Positive, checked
from thinwire.formats.base import Format, GroupSize, flat32, widths
from thinwire.kernels.memory import constant
from thinwire.kernels.parts import Parts


@final
@checked
@dataclass(frozen=True, kw_only=True)
class Magnitudes(Format):
    """Send the sign, and the nearest of 2, 4, 8, … levels to the magnitude divided by its group's mean magnitude.

    The scale is then set so that the group's squared error is least. It is biased and needs error feedback. A zero
    counts as plus. A group of zeros stays zero, because its scale is 0.

    Args:
        levels: By default, those of least error for the tail of a Laplace distribution above a threshold, which is what
            Top-k selects. For all values of a normal distribution they are (0.57, 1.89) and, with 3 bits, (0.31, 0.95,
            1.68, 2.70) (Max 1960).
        group_size: Values that share a scale.

    Raises:
        ValueError: Unless the levels ascend and are a power of two in number, at least two.
    """

    levels: tuple[Positive, ...] = (0.92, 1.31)
    group_size: GroupSize = 64
    bits: int = field(init=False)

    def __post_init__(self) -> None:
        count = len(self.levels)
        if count < 2 or count & (count - 1) or count > 2**14 or any(a >= b for a, b in pairwise(self.levels)):
            raise ValueError(f"levels is {self.levels}; expected 2, 4, 8, … numbers in ascending order")
        object.__setattr__(self, "bits", count.bit_length())

    def encode_each(
        self, xs: Parts, *, seeds: Sequence[int], factor: float = 1.0, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return codes, those of negative values from 2^(bits-1) on, and scales of least squared error."""
        runs, x = xs.cut.lengths, flat32(xs, factor)
        codes, scales = map(torch.cat, zip(*map(self._encoded, x.split(runs)), strict=True))
        if out is not None:
            self.decode_into(out, codes, scales, runs)
        return codes, scales

    def _encoded(self, x: Tensor) -> tuple[Tensor, Tensor]:
        groups, magnitudes = self.groups((x.numel(),)), x.abs()
        average = kernels.group_scales(x, groups, 1.0, widths(groups, x.device), 0.0)  # the mean magnitude
        group = torch.arange(x.numel(), device=x.device) // self.width(x.numel())
        levels = constant(self.levels, torch.float32, x.device)
        nearest = torch.bucketize(magnitudes / average[group], (levels[1:] + levels[:-1]) / 2)
        codes = (nearest + len(self.levels) * (x < 0)).to(self.code_dtype)
        chosen = levels[nearest.clamp_(max=len(self.levels) - 1)].double()
        return codes, _fitted(magnitudes.double(), chosen, group, average)

    def table(self) -> Tensor:
        """Return the levels, and minus the levels."""
        levels = torch.tensor(self.levels, dtype=torch.float32, device="cpu")
        return torch.cat((levels, -levels))


def _fitted(magnitudes: Tensor, chosen: Tensor, group: Tensor, average: Tensor) -> Tensor:
    """Return Σ |x| · level / Σ level² of each group: where the derivative of its squared error is zero."""
    above, below = (torch.zeros_like(average, dtype=torch.float64) for _ in range(2))
    above.index_add_(0, group, magnitudes * chosen)
    below.index_add_(0, group, chosen.square())
    return torch.where(average > 0, (above / below).float(), average)

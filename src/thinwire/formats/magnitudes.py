"""A sign, and one of a few magnitudes: two bits and more, with error feedback."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import final

import torch
from torch import Tensor

from thinwire.checked import Positive, checked
from thinwire.formats.base import Format, GroupSize, flat32, means
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
        runs = xs.cut.lengths
        codes, scales = map(torch.cat, zip(*map(self._encoded, flat32(xs, factor).split(runs)), strict=True))
        if out is not None:
            self.decode_into(out, codes, scales, runs)
        return codes, scales

    def _encoded(self, x: Tensor) -> tuple[Tensor, Tensor]:
        groups = self.groups((x.numel(),))
        average = means(x, groups)
        magnitudes = x.abs()
        levels = constant(self.levels, torch.float32, x.device)
        between = (levels[1:] + levels[:-1]) / 2
        nearest = torch.bucketize(magnitudes / self._of_each(average, x), between)
        codes = (nearest + len(self.levels) * (x < 0)).to(self.code_dtype)
        return codes, self._fitted(magnitudes, levels[nearest.clamp(max=len(self.levels) - 1)], average)

    def table(self) -> Tensor:
        """Return the levels, and minus the levels."""
        levels = torch.tensor(self.levels)
        return torch.cat((levels, -levels))

    def _of_each(self, scales: Tensor, x: Tensor) -> Tensor:
        return scales.repeat_interleave(self.width(x.numel()))[: x.numel()]

    def _fitted(self, magnitudes: Tensor, chosen: Tensor, average: Tensor) -> Tensor:
        """Return Σ |x| · level / Σ level² of each group: where the derivative of its squared error is zero."""
        group = self._of_each(torch.arange(average.numel(), device=average.device), magnitudes)
        above, below = (torch.zeros(average.numel(), dtype=torch.float64, device=average.device) for _ in range(2))
        above.index_add_(0, group, magnitudes.double() * chosen)
        below.index_add_(0, group, chosen.double().square())
        return torch.where(average > 0, (above / below).float(), average)

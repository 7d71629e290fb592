"""One bit for a number: its sign, scaled."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

from thinwire.checked import checked
from thinwire.formats.base import Format, GroupSize, flat32, means


@final
@checked
@dataclass(frozen=True, kw_only=True)
class Sign(Format):
    """Send the sign, times the group's mean magnitude; a zero counts as plus (EF-SGD, Karimireddy et al. 2019).

    It is biased and needs error feedback. A vector of zeros stays zero, because its scale is 0.

    Args:
        group_size: Values that share a scale; None is a whole tensor.
    """

    group_size: GroupSize = None
    bits: int = field(default=1, init=False)

    def encode_each(
        self, x: Tensor, runs: tuple[int, ...], *, seeds: Sequence[int], out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return codes 0 (plus) or 1 (minus), and the mean magnitudes."""
        x, groups = flat32(x), self.groups(runs)
        scales = means(x, groups)
        return self.codes(x, scales, groups, "sign", seeds, out), scales

    def table(self) -> Tensor:
        """Return 1 and -1."""
        return torch.tensor([1.0, -1.0])

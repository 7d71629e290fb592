"""One bit for a number: its sign, scaled."""

from dataclasses import dataclass, field
from typing import ClassVar, final

import torch
from torch import Tensor
from typing_extensions import override

from thinwire.checked import checked
from thinwire.formats.base import GroupSize, Scaled, widths
from thinwire.kernels import Groups, Norm
from thinwire.kernels.codes.reference import How


@final
@checked
@dataclass(frozen=True, kw_only=True)
class Sign(Scaled):
    """Send the sign, times the group's mean magnitude; a zero counts as plus (EF-SGD, Karimireddy et al. 2019).

    It is biased and needs error feedback. A vector of zeros stays zero, because its scale is 0.

    Args:
        group_size: Values that share a scale; None is a whole tensor.
    """

    group_size: GroupSize = None
    bits: int = field(default=1, init=False)
    how: ClassVar[How] = "sign"

    @override
    def scaling(self, groups: Groups, device: torch.device) -> Norm:
        return Norm(1.0, widths(groups, device), 0.0)

    def table(self) -> Tensor:
        """Return 1 and -1."""
        return torch.tensor([1.0, -1.0])

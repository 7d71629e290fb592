"""Formats that scale each group of numbers by a norm: uniform levels (QSGD), a sign, and three values (TernGrad)."""

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, final

import torch
from torch import Tensor
from typing_extensions import override

from thinwire import kernels
from thinwire.checked import Positive, checked
from thinwire.formats.base import Bits, Format, GroupSize, widths
from thinwire.kernels import Groups, Norm, UniformGrid
from thinwire.kernels.codes.reference import How
from thinwire.kernels.memory import empty
from thinwire.kernels.parts import Parts

_ORDERS = {"l2": 2.0, "max": math.inf}


class Scaled(Format):
    """A format that scales each group by a norm of it: then each number's code follows by itself."""

    @property
    @abstractmethod
    def how(self) -> How:
        """Which code a number gets."""

    @abstractmethod
    def scaling(self, groups: Groups, device: torch.device) -> Norm:
        """Return what each group's scale is."""

    @final
    @override
    def encode_each(
        self, xs: Parts, *, seeds: Sequence[int], factor: float = 1.0, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        runs, device = xs.cut.lengths, xs.flat.device
        codes, decoded = empty(sum(runs), self.code_dtype, device), () if out is None else (self.on(device), out)
        groups = self.groups(runs)
        norm = self.scaling(groups, device)
        return codes, kernels.scaled_encode(codes, xs, groups, norm, self.how, seeds, factor, *decoded)


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
        codes = torch.arange(2 * self._levels + 1, dtype=torch.float32, device="cpu")
        return torch.cat(((codes - self._levels) / self._levels, codes.new_full((1,), torch.nan)))

    @property
    @override
    def how(self) -> UniformGrid:
        return UniformGrid(self._levels, self.rounding == "nearest")

    @property
    def _levels(self) -> int:
        return int(2 ** (self.bits - 1)) - 1


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
        return torch.tensor([1.0, -1.0], dtype=torch.float32, device="cpu")


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
        return torch.tensor([0.0, 1.0, -1.0, torch.nan], dtype=torch.float32, device="cpu")

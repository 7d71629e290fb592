"""What kernels add up before they do something with it: gradients and residuals of several vectors."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, final

import numpy as np
import torch
from torch import Tensor

from thinwire.kernels.parts import REALS, Array, Parts

COLUMNS = ("outs", "residuals", "gradients", "scales", "decays", "moving", "velocities", "seeds")
How = Literal["sum", "fading", "momentum", "nesterov", "rounded"]


@final
@dataclass(eq=False)
class Sum:
    """The sums of n ≥ 1 vectors: out = residual + scale · gradient. An out may not overlap what it is computed from.

    Args:
        gradients: Of any float, the others of one: gradients are converted first.
        decays: With them, out = decay · residual + scale · gradient.
        moving, velocities: With them, moving = momentum · velocity + scale · gradient, and out = residual + moving.
        nesterov: out = residual + scale · gradient + momentum · moving.
        seeds: With them, outs and residuals are bfloat16. Sums of float32 are rounded to it stochastically: rounding to
            nearest would lose a small gradient beside a large residual for good, and this keeps the mean. Element i
            draws mix(i). Values that are not finite stay so. Here an out may be the residual.
    """

    outs: Sequence[Tensor]
    residuals: Sequence[Tensor]
    gradients: Sequence[Tensor]
    scales: Sequence[float]
    decays: Sequence[float] | None = None
    moving: Sequence[Tensor] | None = None
    velocities: Sequence[Tensor] | None = None
    momentum: float = 0.0
    nesterov: bool = False
    seeds: Sequence[int] | None = None

    def __len__(self) -> int:
        return len(self.scales)

    def __getitem__(self, some: slice) -> "Sum":
        """Return the sums of some neighbours."""
        if some.stop - some.start == len(self.scales):
            return self
        return replace(self, **{name: column[some] for name, column in self._columns})

    def one(self, i: int) -> "Sum":
        """Return one of them. A decay of 1 is none."""
        columns = {name: [column[i]] for name, column in self._columns}
        if columns.get("decays") == [1]:
            del columns["decays"]
        return Sum(**columns, momentum=self.momentum, nesterov=self.nesterov)

    @property
    def _columns(self) -> Iterator[tuple[str, Any]]:
        return ((name, column) for name in COLUMNS if (column := getattr(self, name)) is not None)

    def sample(self, offset: int, stride: int) -> Tensor:
        """Return every stride-th element of the first sum, from `offset` on; if it is rounded, before that."""
        residual, gradient = self.residuals[0][offset::stride], self.gradients[0][offset::stride]
        alpha, wide = self.scales[0], residual.float() if self.seeds is not None else residual
        if self.velocities is None:
            kept = wide if self.decays is None else wide.mul(self.decays[0])
            return kept.add(gradient, alpha=alpha)
        moving = self.velocities[0][offset::stride].mul(self.momentum).add_(gradient, alpha=alpha)
        return wide.add(gradient, alpha=alpha).add_(moving, alpha=self.momentum) if self.nesterov else wide + moving

    @cached_property
    def how(self) -> How:
        """Which of the formulas it is."""
        if self.velocities is not None:
            return "nesterov" if self.nesterov else "momentum"
        return "rounded" if self.seeds is not None else "sum" if self.decays is None else "fading"

    @property
    def deciding(self) -> Sequence[Sequence[Tensor]]:
        """The tensors that decide where it is computed. Gradients do not where they are converted first."""
        if self.moving is not None and self.velocities is not None:
            return self.outs, self.residuals, self.moving, self.velocities
        return (self.outs, self.residuals, self.gradients) if self.seeds is not None else (self.outs, self.residuals)

    @cached_property
    def dtype(self) -> torch.dtype:
        """That of the outs."""
        return self.outs.flat.dtype if isinstance(self.outs, Parts) else self.outs[0].dtype

    @property
    def factors(self) -> tuple[Array, Array | None, Any, Any]:
        """What loops take: scales, decays, momentum, and momentum once more for Nesterov's, who looks ahead by it."""
        real = REALS[self.dtype]
        momentum = None if self.velocities is None else real(self.momentum)
        decays = None if self.decays is None else np.array(self.decays, real)
        return np.array(self.scales, real), decays, momentum, momentum if self.nesterov else None

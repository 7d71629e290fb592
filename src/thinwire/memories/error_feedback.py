"""Error feedback (Seide et al. 2014, Stich et al. 2018): what was not delivered is added to the next gradient."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, final

from torch import Tensor

from thinwire import kernels
from thinwire.memories.base import Memory, Staged, State
from thinwire.payloads import Payload
from thinwire.signals import Signal


@final
@dataclass(kw_only=True)
class ErrorFeedback(Memory):
    """r ← r + g − delivered."""

    fields: ClassVar[frozenset[str]] = frozenset({"residual"})

    _residual: Staged = field(default_factory=Staged, init=False, repr=False)

    def compensate(self, name: str, gradient: Tensor, scale: float) -> Signal:
        """Return r + scale · g."""
        residual, out = self._residual.open(name, gradient)
        return _Sum(out, residual, gradient, scale)

    def retain(self, name: str, delivered: Payload) -> None:
        """Subtract what was delivered."""
        delivered.subtract_from(self._residual.staged(name))

    def commit(self) -> None:
        """Keep what was staged."""
        self._residual.commit()

    def rollback(self) -> None:
        """Drop what was staged."""
        self._residual.rollback()

    def rescale(self, factor: float) -> None:
        """Multiply the residual."""
        self._residual.rescale(factor)

    def state(self) -> State:
        """Return {name: {"residual": r}}."""
        return {name: {"residual": tensor} for name, tensor in self._residual.committed().items()}

    def restore(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Take over residuals."""
        self._residual.restore({name: fields["residual"] for name, fields in state.items()})


@final
class _Sum(Signal):
    """residual + scale · gradient, into `out`."""

    def __init__(self, out: Tensor, residual: Tensor, gradient: Tensor, scale: float) -> None:
        self._out, self._inputs, self._pending = out, (residual, gradient, scale), True
        self.dtype, self.numel, self.device = gradient.dtype, gradient.numel(), gradient.device

    def tensor(self) -> Tensor:
        if self._pending:
            self._pending = False
            kernels.backend(self._out, *self._inputs[:2]).accumulate(self._out, *self._inputs)
        return self._out

    def sample(self, offset: int, stride: int) -> Tensor:
        residual, gradient, scale = self._inputs
        return residual[offset::stride].add(gradient[offset::stride], alpha=scale)

    def select(self, threshold: float, capacity: int) -> Tensor | None:
        self._pending = False
        kernel = kernels.backend(self._out, *self._inputs[:2])
        return kernel.accumulate_select(self._out, *self._inputs, threshold, capacity)

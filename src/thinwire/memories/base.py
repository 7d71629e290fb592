"""Residuals: what has not been sent yet. The only tensors kept between steps, by parameter name."""

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self, final

import torch
from torch import Tensor
from typing_extensions import override

from thinwire.kernels.parts import Ints, Vectors, whole
from thinwire.memories.staged import Staged
from thinwire.payloads import Payload, Scratch
from thinwire.signals import Plains, Signal, Signals
from thinwire.waits import on_host

State = dict[str, dict[str, Tensor]]


class Memory(ABC):
    """Holds the residual: what has not been sent yet.

    A step's changes are staged until `commit` or `rollback`, and what was committed is only read. So a step can be
    rolled back even after parts of it have been sent. The gradient of one step may arrive in several parts: if a
    parameter comes again, it continues from what is staged. Who calls `commit` and `rollback`, and when:
    docs/explanation/steps.md; on a parameter server, the trainer does with each update.
    """

    stateful: ClassVar[bool] = True
    free: ClassVar[frozenset[str]] = frozenset()
    """The fields whose tensors are flat and of any length, not shaped like the parameter."""
    residual: ClassVar[str] = "residual"
    """The field that waits to be sent."""
    releases: ClassVar[bool] = False
    """Whether the residual can be sent with an uncompressed gradient, by `release`."""
    keeps_length: ClassVar[bool] = True
    """Whether what is sent is large where the gradients are, so that uncompressed ones may come before and after it."""
    _loss_scale = 1.0

    @property
    def fields(self) -> frozenset[str]:
        """The names that `state` may hold under a parameter."""
        return frozenset(self.tensors())

    @property
    def scratch(self) -> Scratch:
        """What computing the sum takes beside it. By default nothing: it is written where it stays."""
        return Scratch()

    def held(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which this memory holds the residual of a parameter of `dtype`."""
        return torch.promote_types(dtype, torch.float32)

    @property
    def parts(self) -> "Sequence[Memory]":
        """This memory, and those within it."""
        return (self,)

    def fresh(self) -> Self:
        """Return an empty memory with the same settings."""
        return replace(self)  # type: ignore[type-var]  # every concrete memory is a dataclass

    def blank(self) -> Self:
        """Return an empty memory that works without an optimizer, for trial steps."""
        return self.fresh()

    @abstractmethod
    def compensate_each(self, names: Sequence[str], gradients: Vectors, scale: float, seeds: Ints) -> Signals:
        """Return each residual plus scale · gradient (flat), and stage it as if nothing were sent.

        Args:
            names: The parameters'.
            gradients: One for each. If something is staged for a name already, this is another part of the same step's
                gradient.
            scale: Multiplies all of them, so that sums become means.
            seeds: One for each, for memories with stochastic rounding.

        Returns:
            The sums, which may be computed only when a codec reads them.
        """

    @final
    def compensate(self, name: str, gradient: Tensor, scale: float, *, seed: int = 0) -> Signal:
        """Return what `compensate_each` does, for one parameter.

        Args:
            name: The parameter's.
            gradient: Flat.
            scale: Multiplies it.
            seed: For stochastic rounding.
        """
        return self.compensate_each([name], [gradient], scale, [seed])[0]

    @abstractmethod
    def retain(self, names: Sequence[str], delivered: Payload) -> None:
        """Subtract what was delivered from the staged residual; the payload has a region for each of `names`."""

    def tensors(self) -> "Mapping[str, Staged]":
        """Return what is held, by field. By default, nothing."""
        return {}

    def commit(self, names: Collection[str] | None = None) -> None:
        """Keep what was staged for parameters `names`, by default for all."""
        for held in self.tensors().values():
            held.commit(names)

    def rollback(self, names: Collection[str] | None = None) -> None:
        """Drop what was staged for parameters `names`, by default for all."""
        for held in self.tensors().values():
            held.rollback(names)

    def rescale(self, factor: float) -> None:
        """Multiply every residual by `factor`, the change of the loss scale (1 at first)."""
        self._loss_scale *= factor
        for held in self.tensors().values():
            held.rescale(factor)

    def state(self) -> State:
        """Return the committed tensors: parameter name → field → flat tensor. Not copies."""
        found: State = {}
        for field, held in self.tensors().items():
            for name, tensor in held.committed().items():
                found.setdefault(name, {})[field] = tensor
        return found

    def restore(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Load tensors as `state` returned them; they are copied."""
        for field, held in self.tensors().items():
            held.restore({name: fields[field] for name, fields in state.items() if field in fields})

    def waits(self, name: str = "") -> bool:
        """Whether there is a residual for `name` (by default, for any parameter) that `release` can send."""
        return False

    def release(self, name: str, gradient: Tensor, scale: float) -> None:  # noqa: B027 - only for those that release
        """Add residual / `scale` of parameter `name` to its gradient, which is sent uncompressed.

        `commit` then drops it from the memory.
        """

    def waiting(self) -> Sequence[Tensor]:
        """Return the residuals, not copied."""
        return [fields[self.residual] for fields in self.state().values() if self.residual in fields]

    @property
    def nbytes(self) -> int:
        """Bytes held, including the second copy that `rollback` needs."""
        return 2 * sum(tensor.nbytes for fields in self.state().values() for tensor in fields.values())


@final
@dataclass(kw_only=True)
class NoMemory(Memory):
    """What a codec drops is lost."""

    stateful: ClassVar[bool] = False

    def compensate_each(self, names: Sequence[str], gradients: Vectors, scale: float, seeds: Ints) -> Signals:
        """Scale the gradients in place, as DDP does; on a GPU not before they are needed."""
        if not on_host(gradients[0]):
            return Plains(gradients, scale)
        for x in whole(gradients) if scale != 1 else ():
            x.mul_(scale)  # torch's _foreach_mul_ rounds the scale to 16 bits first, and DDP does not
        return Plains(gradients)

    @override
    def retain(self, names: Sequence[str], delivered: Payload) -> None:
        pass


def limited_each(
    gradients: Sequence[Tensor], scale: float, limit: float | None, loss_scale: float
) -> tuple[Sequence[Tensor], Sequence[float]]:
    """Return gradients and factors that make the limited ones times `scale`, 1/world_size; NaN stays.

    This is local gradient clipping (Lin et al. 2018, §3): each is clipped to a norm of limit/√world_size times the loss
    scale. None: no limit.
    """
    if limit is None:
        return gradients, [scale] * len(gradients)
    most = limit * loss_scale * math.sqrt(scale)
    limited, factors = zip(*(_limited(gradient, scale, most) for gradient in gradients), strict=True)
    return limited, factors


def _limited(gradient: Tensor, scale: float, limit: float) -> tuple[Tensor, float]:
    norm = torch.linalg.vector_norm(gradient, dtype=torch.float64)
    if not on_host(norm):
        factor = torch.where(norm.isfinite() & (norm > limit), limit / norm, 1.0)
        return gradient * factor.to(gradient.dtype), scale
    length = float(norm)
    return gradient, scale * (limit / length if math.isfinite(length) and length > limit else 1.0)

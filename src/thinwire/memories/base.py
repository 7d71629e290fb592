"""Residuals: what has not been sent yet. The only tensors kept between steps, by parameter name."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self, final

import torch
from torch import Tensor

from thinwire.kernels.memory import empty
from thinwire.payloads import Payload, Scratch
from thinwire.signals import Plain, Signal
from thinwire.waits import on_host

State = dict[str, dict[str, Tensor]]


class Memory(ABC):
    """Holds the residual: what has not been sent yet. A step's changes are staged until `commit` or `rollback`.

    Only `compensate` reads what was committed. So a step can be rolled back even after parts of it have been sent. The
    gradient of one step may arrive in several parts: if a parameter comes again, it continues from what is staged.
    integrations/training/steps.py calls `commit` and `rollback`, as docs/explanation/steps.md says.
    """

    stateful: ClassVar[bool] = True
    fields: ClassVar[frozenset[str]]
    """The names that `state` may hold under a parameter."""
    free: ClassVar[frozenset[str]] = frozenset()
    """The fields whose tensors are flat and of any length, not shaped like the parameter."""
    releases: ClassVar[bool] = False
    """Whether the residual can be sent with an uncompressed gradient, by `release`."""
    keeps_length: ClassVar[bool] = True
    """Whether what is sent is large where the gradients are, so that uncompressed ones may come before and after it."""

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
        """Return a fresh memory that works without an optimizer, to try something out."""
        return self.fresh()

    @abstractmethod
    def compensate(self, name: str, gradient: Tensor, scale: float, *, seed: int = 0) -> Signal:
        """Return the residual of parameter `name` plus scale · gradient (flat), and stage it as if nothing were sent.

        If something is staged for `name` already, this is another part of the same step's gradient. `seed` is for
        memories with stochastic rounding.
        """

    def compensate_each(
        self, names: Sequence[str], gradients: Sequence[Tensor], scale: float, seeds: Sequence[int]
    ) -> list[Signal]:
        """Do the same for several parameters."""
        pairs = enumerate(zip(names, gradients, strict=True))
        return [self.compensate(name, gradient, scale, seed=seeds[i]) for i, (name, gradient) in pairs]

    @abstractmethod
    def retain(self, names: Sequence[str], delivered: Payload) -> None:
        """Subtract what was delivered from the staged residual; the payload has a region for each of `names`."""

    def tensors(self) -> "Mapping[str, Staged]":
        """Return what is held, by the names of `fields`. By default, nothing."""
        return {}

    def commit(self, names: Collection[str] | None = None) -> None:
        """Keep what was staged for these parameters; by default, for all."""
        for held in self.tensors().values():
            held.commit(names)

    def rollback(self, names: Collection[str] | None = None) -> None:
        """Drop what was staged for these parameters; by default, for all."""
        for held in self.tensors().values():
            held.rollback(names)

    def rescale(self, factor: float) -> None:
        """Multiply every residual by `factor`, as the loss scale (1 at first) has been."""
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
        """Whether parameter `name`, or without a name any parameter, has a residual that `release` can send."""
        return False

    def release(self, name: str, gradient: Tensor, scale: float) -> None:  # noqa: B027 - only for those that release
        """Add residual / scale to a gradient that is sent uncompressed; `commit` then drops it from the memory."""

    def waiting(self) -> Sequence[Tensor]:
        """Return the residuals, not copied."""
        return [fields["residual"] for fields in self.state().values() if "residual" in fields]

    @property
    def nbytes(self) -> int:
        """Bytes held, including the second copy that `rollback` needs."""
        return 2 * sum(tensor.nbytes for fields in self.state().values() for tensor in fields.values())


@final
@dataclass(kw_only=True)
class NoMemory(Memory):
    """What a codec drops is lost."""

    stateful: ClassVar[bool] = False
    fields: ClassVar[frozenset[str]] = frozenset()

    def compensate(self, name: str, gradient: Tensor, scale: float, *, seed: int = 0) -> Signal:
        """Scale the gradient in place, as DDP does."""
        return Plain(gradient if scale == 1 else gradient.mul_(scale))

    def compensate_each(
        self, names: Sequence[str], gradients: Sequence[Tensor], scale: float, seeds: Sequence[int]
    ) -> list[Signal]:
        """Scale each gradient in place."""
        if scale == 1 or on_host(gradients[0]):
            return [self.compensate(name, gradient, scale) for name, gradient in zip(names, gradients, strict=True)]
        torch._foreach_mul_(list(gradients), scale)
        return list(map(Plain, gradients))

    def retain(self, names: Sequence[str], delivered: Payload) -> None:
        """Do nothing."""


class Staged:
    """Two versions of one flat tensor per name, committed and staged. Committing swaps them, so nothing is copied.

    They are held in `dtype`, or by default in float32 or wider.
    """

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self._dtype = dtype
        self._committed: dict[str, Tensor] = {}
        self._spare: dict[str, Tensor] = {}
        self._staged: set[str] = set()
        self._closing: set[str] = set()

    def open(self, name: str, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return (committed, staged) for `name`; a new name starts at zero. The caller overwrites the staged one."""
        if name not in self._committed:
            dtype = self._dtype or torch.promote_types(like.dtype, torch.float32)
            self._committed[name] = empty(like.numel(), dtype, like.device).zero_()
        if name not in self._spare:
            held = self._committed[name]
            self._spare[name] = empty(held.numel(), held.dtype, held.device)
        self._staged.add(name)
        if name in self._closing:  # what waited has been handed out in an earlier part of this step
            self._closing.discard(name)
            return torch.zeros_like(self._committed[name]), self._spare[name]
        return self._committed[name], self._spare[name]

    def open_each(self, names: Sequence[str], likes: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """`open` several."""
        if not self._closing and self._committed.keys() >= set(names) <= self._spare.keys():
            self._staged.update(names)
            return [(self._committed[name], self._spare[name]) for name in names]
        return [self.open(name, like) for name, like in zip(names, likes, strict=True)]

    def continue_any(self, names: Sequence[str]) -> bool:
        """Whether something is staged for any of these."""
        return not self._staged.isdisjoint(names)

    def continues(self, name: str) -> bool:
        """Whether something is staged for `name`."""
        return name in self._staged

    def close(self, name: str) -> Tensor:
        """Return the residual of `name`; `commit` will drop it."""
        self._closing.add(name)
        return self._spare[name] if name in self._staged else self._committed[name]

    def waits(self, name: str) -> bool:
        """Whether `name` has a residual that `close` has not returned yet."""
        return name in self._committed and name not in self._closing

    def staged(self, name: str) -> Tensor:
        """Return the staged version."""
        return self._spare[name]

    def staged_each(self, names: Sequence[str]) -> list[Tensor]:
        """Return the staged versions."""
        return [self._spare[name] for name in names]

    def commit(self, names: Collection[str] | None = None) -> None:
        """Replace committed versions with staged ones."""
        committed, spare = self._committed, self._spare
        for name in _among(self._staged, names):
            committed[name], spare[name] = spare[name], committed[name]
        for name in _among(self._closing, names) if self._closing else ():
            del committed[name]
            spare.pop(name, None)
        self.rollback(names)

    def rollback(self, names: Collection[str] | None = None) -> None:
        """Forget staged versions."""
        for held in (self._staged, self._closing):
            held.difference_update(held.copy() if names is None else names)

    def drop(self, names: Collection[str]) -> None:
        """Forget both versions of these."""
        for name in names:
            self._committed.pop(name, None)
            self._spare.pop(name, None)
        self.rollback(names)

    def rescale(self, factor: float) -> None:
        """Multiply the committed versions."""
        for tensor in self._committed.values():
            tensor.mul_(factor)

    def committed(self) -> dict[str, Tensor]:
        """Return the committed versions."""
        return dict(self._committed)

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace everything with copies of `tensors`."""
        self._committed = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        self._spare.clear()
        self.rollback()


def _among(names: set[str], wanted: Collection[str] | None) -> set[str]:
    return set(names) if wanted is None else names.intersection(wanted)

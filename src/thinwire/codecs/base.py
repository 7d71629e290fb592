"""The codec contract: a vector in, a payload out."""

from abc import ABC, abstractmethod
from dataclasses import fields, replace
from typing import Any, ClassVar, Self, final

from torch import Tensor

from thinwire import schedules
from thinwire.payloads import Payload
from thinwire.signals import Plain, Signal


class Codec(ABC):
    """Frozen and stateless. The same vector and seed give the same payload on every rank.

    A vector with a NaN or an infinity in it gives a payload that decodes to something non-finite.
    """

    shared_seed: ClassVar[bool] = False
    """Whether ranks must draw alike. Otherwise each draws on its own, so that their errors average out."""

    @property
    def elementwise(self) -> bool:
        """Whether each element is encoded on its own, so that adjacent tensors may be encoded as one."""
        return False

    @abstractmethod
    def encode_signal(self, signal: Signal, *, seed: int = 0) -> Payload:
        """Encode a vector that may not have been computed yet."""

    @final
    def encode(self, x: Tensor, *, seed: int = 0) -> Payload:
        """Encode a tensor of any shape; the payload is flat and of the tensor's dtype and device."""
        return self.encode_signal(Plain(x.detach().reshape(-1)), seed=seed)

    @final
    def at(self, step: int) -> Self:
        """Return this codec with every schedule replaced by its value at `step`, counted from 0."""
        now: dict[str, Any] = {
            f.name: schedules.resolve(value, step)
            for f in fields(self)  # type: ignore[arg-type]  # every concrete codec is a dataclass
            if isinstance(value := getattr(self, f.name), schedules.Schedule)
        }
        return replace(self, **now) if now else self  # type: ignore[type-var]

    def contraction(self, numel: int) -> float | None:
        """Return δ with E‖x − decode(encode(x))‖² ≤ (1 − δ)·‖x‖² for `numel` elements; None if none is known."""
        return None


def check_density(density: float | schedules.Schedule) -> None:
    """Raise ValueError unless a plain density lies in (0, 1]."""
    if not isinstance(density, schedules.Schedule) and not 0 < density <= 1:
        raise ValueError(f"density is {density}; expected a share of the elements, above 0 and at most 1")


def kept(density: float | schedules.Schedule, numel: int) -> int:
    """Return how many of `numel` elements a density keeps: the nearest whole number, at least one of any."""
    if isinstance(density, schedules.Schedule):
        raise TypeError("the density is a schedule; resolve it first with codec.at(step)")
    check_density(density)
    return min(numel, max(1, round(density * numel)))

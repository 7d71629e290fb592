"""What travels between ranks: the one interface that codecs, memories and exchanges share."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, is_dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from typing_extensions import override

from thinwire import kernels
from thinwire.kernels import Sum, replay
from thinwire.kernels.parts import Parts, cut_at
from thinwire.waits import all_finite

Regions = tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True)
class Scratch:
    """An upper bound on the bytes that an operation holds at once, beside memories, gradients and staging buffers.

    It is a sum over the bucket's vectors, and holds on a CPU. For a recipe's own settings, float32, and vectors of 2^15
    elements or more, it is at most twice what the allocator measured. Python's own objects add up to a kilobyte a
    vector.

    Args:
        element: Bytes for each element of the vectors.
        longest: For each element of the longest vector, where vectors go one by one.
        value: For each number that this rank sends.
        arriving: For each number that it holds of what ranks sent.
        alone: Maps a vector's length to bytes that are held only while that vector is processed.
    """

    element: float = 0.0
    longest: float = 0.0
    value: float = 0.0
    arriving: float = 0.0
    alone: Callable[[int], float] | None = None

    def nbytes(self, lengths: Sequence[int], values: int, arriving: float = 0.0) -> int:
        """Return the bytes that an operation takes.

        Args:
            lengths: Of the bucket's vectors.
            values: How many numbers this rank sends.
            arriving: How many it holds of what ranks sent.
        """
        elements = self.element * sum(lengths) + self.longest * max(lengths, default=0)
        alone = max(map(self.alone, set(lengths)), default=0) if self.alone else 0
        return round(elements + self.value * values + self.arriving * arriving + alone)


class Payload(ABC):
    """A compressed vector of `numel` elements. It covers only the vector's `regions` ((offset, length), …).

    `values` are the numbers that travel. If a payload is `summable`, adding the values of several ranks adds their
    vectors; if not, payloads are concatenated. Payloads never change: methods return new ones.
    """

    numel: int
    regions: Regions
    values: Tensor

    masks: ClassVar[bool] = True
    """Whether single elements are picked out, so that `mask` does something."""
    transformed: ClassVar[bool] = False
    """Whether coefficients travel: their transform does not fit into 16 bits."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "regions", self.regions or ((0, self.numel),))

    @property
    def scratch(self) -> Scratch:
        """What this payload takes from the time it is packed until it is written."""
        return Scratch(value=24, arriving=30)

    @property
    @abstractmethod
    def summable(self) -> bool:
        """Whether adding values adds payloads."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Length of `to_buffer()` in bytes, header included."""

    @abstractmethod
    def counts(self) -> Sequence[int]:
        """Return how many values travel for each region."""

    def carried(self) -> int | Tensor:
        """Return how many values travel without padding; a 0-dim tensor where only the device knows."""
        return sum(self.counts())

    def with_values(self, values: Tensor) -> Self:
        """Return the same payload with other values of the same shape, as plain ones."""
        return replace(self, values=values, coded=None)  # type: ignore[type-var]  # each is a dataclass

    @abstractmethod
    def to_buffer(self) -> Tensor:
        """Return the bytes that travel as one contiguous uint8 tensor; docs/explanation/wire-format.md has them."""

    @cached_property
    def packed(self) -> Tensor:
        """What `to_buffer` returns, made once."""
        return self.to_buffer()

    @abstractmethod
    def from_buffers(self, buffers: Tensor) -> Self:
        """Return the sum of several ranks' payloads. Where the host must not wait, nothing reads it but `write`.

        Args:
            buffers: What each wrote with `to_buffer`, uint8 (ranks, nbytes). Each must have this payload's layout.

        Raises:
            PayloadError: Otherwise, before anything is written.
        """

    @abstractmethod
    def write(self, out: Tensor) -> None:
        """Overwrite the regions of the flat tensor `out` (numel elements) with this vector."""

    @abstractmethod
    def subtract_from(self, parts: Sequence[Tensor]) -> None:
        """Subtract this vector, region by region, in place: `parts` has a flat tensor for each region."""

    def subtract_rounded(self, parts: Sequence[Tensor], seeds: Sequence[int]) -> None:
        """Do what `subtract_from` does to parts in bfloat16, and round stochastically, with a seed for each."""
        taken = [torch.zeros_like(x, dtype=torch.float32) for x in parts]
        self.subtract_from(taken)
        if parts:
            kernels.accumulate(Sum(parts, parts, taken, [1.0] * len(taken), seeds=seeds))

    def mask(self, parts: Sequence[Tensor | None]) -> None:  # noqa: B027 - not every payload does
        """Set each region's part to zero where this payload picked out single elements; skip parts that are None.

        A payload that carries every element masks nothing.
        """

    def take_from(self, parts: Sequence[Tensor], masked: Sequence[Tensor]) -> None:
        """Do what `subtract_from` and `mask` do.

        Args:
            parts: What is subtracted from.
            masked: What is masked.
        """
        self.subtract_from(parts)
        self.mask(masked)

    def settle(self, retain: Callable[[Self], None], total: "Payload", out: Tensor) -> None:
        """Have this payload retained, and write the sum of all ranks' ones: in one launch, where a GPU can.

        Args:
            retain: Subtracts the payload that it is given from what it came from.
            total: The sum.
            out: Where it is written.
        """
        retain(self)
        total.write(out)

    def is_finite(self, out: Tensor) -> bool:
        """Whether `out`, just written, is finite everywhere this payload wrote."""
        return all_finite(Parts(out, cut_at(self.regions).joined))

    @classmethod
    @abstractmethod
    def assemble(cls, parts: Sequence[Self], offsets: Sequence[int], numel: int) -> Self:
        """Return vectors side by side, part i at offsets[i], in a space of `numel` elements."""

    @classmethod
    def concat(cls, payloads: Sequence[Self]) -> Self:
        """Return the sum of payloads that are laid out alike."""
        return payloads[0].from_buffers(torch.stack([each.to_buffer() for each in payloads]))

    def tensors(self) -> Sequence[Tensor]:
        """Return the tensors that it holds, those of its codes and coefficients included."""
        return [x for _, _, x in _held(self)]

    def last(self, carried: int | Tensor, *, values: bool) -> tuple[Self, int | Tensor]:
        """Return it, packed, and what it carries, with tensors that last until they are read, where that is captured.

        Codes are never read again, nor are values without `values`: only their number stays.

        Args:
            carried: How many values it carries.
            values: Whether its values are read again.

        Returns:
            It, and what was carried.
        """
        _ = self.packed
        unread = {"codes"} if values else {"codes", "values"}
        held = list(_held(self))
        beside = [carried] if isinstance(carried, Tensor) else []
        found = replay.lasting([*beside, *(x.new_empty(()) if name in unread else x for _, name, x in held)])
        for (holder, name, x), there in zip(held, found[len(beside) :], strict=True):
            holder[name] = there.expand(x.shape)
        return self, found[0] if beside else carried

    def dense(self) -> Tensor:
        """Return the vector as a new flat tensor of the values' dtype; of a transform, in float32 or wider."""
        out = self.values.new_zeros(self.numel, dtype=real(self.values.dtype) if self.transformed else None)
        self.write(out)
        return out


class Settling(Payload):
    """A payload that a GPU subtracts in the launch that writes a sum of its kind."""

    _unwritten: list[tuple[Self, Tensor]]
    """A sum that is to be written when this is subtracted, and where."""

    @override
    def settle(self, retain: Callable[[Self], None], total: Payload, out: Tensor) -> None:
        if not isinstance(total, type(self)):
            super().settle(retain, total, out)
            return
        mine = replace(self)  # type: ignore[type-var]  # each is a dataclass
        mine._unwritten.append((total, out))
        retain(mine)
        if mine._unwritten:
            total.write(out)


class Regional(Payload):
    """A payload of which each region's vector is computed as a whole."""

    @abstractmethod
    def vectors(self) -> Sequence[Tensor]:
        """Return the vector of each region."""

    def write(self, out: Tensor) -> None:
        """Overwrite the regions."""
        for (offset, length), x in zip(self.regions, self.vectors(), strict=True):
            out[offset : offset + length].copy_(x)

    def subtract_from(self, parts: Sequence[Tensor]) -> None:
        """Subtract each region's vector from its part."""
        for part, x in zip(parts, self.vectors(), strict=True):
            part.sub_(x)


def real(dtype: torch.dtype) -> torch.dtype:
    """Return a dtype, or float32 if that is wider: what transforms are computed in."""
    return torch.promote_types(dtype, torch.float32)


def widening(dtype: torch.dtype, lengths: Sequence[int]) -> int:
    """Return the bytes of the longest vector in float32, if this dtype is narrower: an overflow is written in that."""
    return 4 * max(lengths, default=0) if dtype.itemsize < 4 else 0


def _held(holder: object) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    """Yield the tensors of a payload, and which attributes they are."""
    attributes = getattr(holder, "__dict__", {})
    for name, held in attributes.items():
        if isinstance(held, Tensor):
            yield attributes, name, held
        elif is_dataclass(held):
            yield from _held(held)

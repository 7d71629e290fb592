"""The format contract: numbers in, codes of a few bits and scales out."""

import math
from abc import ABC, abstractmethod
from functools import lru_cache
from typing import final

import torch
from torch import Tensor


class Format(ABC):
    """Frozen, hashable and stateless. A number travels as one of 2^bits codes.

    `group` consecutive numbers share a scale, or None all of a vector. A group with a NaN or an infinity in it
    (float64 beyond float32 is one) gets scale NaN, so that all of it decodes to NaN.
    """

    bits: int
    group: int | None

    @property
    @abstractmethod
    def unbiased(self) -> bool:
        """Whether the expectation of decode(encode(x)) over seeds is x."""

    @abstractmethod
    def encode(self, x: Tensor, *, seed: int) -> tuple[Tensor, Tensor]:
        """Return codes int16 (n) and scales float32 (scale_count(n)) of a flat floating-point tensor (n)."""

    @abstractmethod
    def table(self) -> Tensor:
        """Return what each code stands for at scale 1, float32 (2^bits); NaN for codes that are never sent."""

    @final
    def decode(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Return float32 (n) for codes int16 (n) and scales float32: one per value, or one for all."""
        return _table(self, codes.device).index_select(0, codes.to(torch.int32)).mul_(scales)

    @final
    def scale_count(self, numel: int) -> int:
        """Return how many scales `numel` values have."""
        return -(-numel // (self.group or max(1, numel)))

    @final
    def expand(self, scales: Tensor, numel: int) -> Tensor:
        """Return one scale per value (numel) for the scales of a vector of `numel` values."""
        return scales.repeat_interleave(self.group)[:numel] if self.group else scales.expand(numel)


# A format is a value, so its table is computed once.
@lru_cache(maxsize=64)
def _table(form: Format, device: torch.device) -> Tensor:
    return form.table().to(device)


def flat32(x: Tensor) -> Tensor:
    """Return `x` flat and as float32; float64 beyond its range becomes infinite."""
    return x.detach().reshape(-1).to(torch.float32)


def norms(x: Tensor, group: int | None, order: float) -> Tensor:
    """Return the norm of each group, float64; not finite where an element is not."""
    width = group or max(1, x.numel())
    full = x.numel() // width
    rows = (x[: full * width].view(full, width), x[None, full * width :])
    parts = [torch.linalg.vector_norm(part, order, dim=1, dtype=torch.float64) for part in rows if part.numel()]
    return torch.cat(parts) if parts else x.new_empty(0, dtype=torch.float64)


def peaks(x: Tensor, group: int | None) -> Tensor:
    """Return the largest magnitude of each group, float32; NaN where an element is not finite."""
    return finite(norms(x, group, math.inf))


def finite(scales: Tensor) -> Tensor:
    """Return scales as float32, NaN where one is not finite in it."""
    scales = scales.to(torch.float32)
    return torch.where(scales.isfinite(), scales, torch.nan)


def widths(x: Tensor, group: int | None) -> Tensor:
    """Return how many elements each group has, float64."""
    width = group or max(1, x.numel())
    starts = torch.arange(0, x.numel(), width, dtype=torch.float64, device=x.device)
    return (x.numel() - starts).clamp_(max=width)


def generator(x: Tensor, seed: int) -> torch.Generator:
    """Return a generator of its own on the tensor's device."""
    return torch.Generator(device=x.device).manual_seed(seed)


def uniform(x: Tensor, seed: int) -> Tensor:
    """Return numbers from [0, 1), float32, one for each element."""
    return torch.rand(x.shape, generator=generator(x, seed), dtype=torch.float32, device=x.device)


def check_bits(bits: int, least: int) -> None:
    """Raise ValueError unless `bits` lies in least..15."""
    if not least <= bits <= 15:
        raise ValueError(f"bits is {bits}; expected {least} to 15")


def check_group(group: int | None) -> None:
    """Raise ValueError unless a group has an element."""
    if group is not None and group < 1:
        raise ValueError(f"group is {group}; expected at least 1 value per scale, or None for one scale in all")

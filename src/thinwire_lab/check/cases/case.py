"""What a kernel is tried on: its arguments at a size, and how close it must come to the reference."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire_lab.check.material import CONTENTS, Kit, Near, Trial

Trials = Iterable[Trial]
SCALE, DECAY = 0.25, 0.5  # powers of two: a fused multiply-add then rounds like two operations
SEED, BITS, GROUP, WIDTH = 2**40 + 7, 10, 512, 32
FLOATS = (torch.float32, torch.float64)


@dataclass(frozen=True, kw_only=True)
class Case:
    """How one kernel is tried.

    near, near_on_gpu: how far floats may be from the reference's; by default no bit may differ. alike: compares
    instead, and returns what is wrong. nbytes: memory that the reference takes per element, roughly.
    """

    make: Callable[[Kit, int], Trials]
    dtypes: tuple[torch.dtype, ...] = FLOATS
    contents: tuple[str, ...] = CONTENTS
    near: Near = Near()  # noqa: RUF009 - frozen
    near_on_gpu: Near | None = None
    alike: Callable[[Trial, list[Any], list[Any]], str] | None = None
    nbytes: int = 64

    def bound(self, device: torch.device) -> Near:
        """Return how far floats may be from the reference's on this device."""
        return self.near_on_gpu if self.near_on_gpu and device.type != "cpu" else self.near


def as_read(_: Trial, found: Sequence[Any], expected: Sequence[Any]) -> str:
    """Compare what was read, and whether it was sound: if not, the numbers may differ."""
    wrong, said = bool(found[1].any()), bool(expected[1].any())
    if wrong != said:
        return f"is {'malformed' if wrong else 'sound'}, expected the opposite"
    return "" if wrong or torch.equal(found[0], expected[0]) else "differs"


def several(x: Tensor) -> list[Tensor]:
    """Return a vector as several, of which some may be empty."""
    return list(x.tensor_split([x.numel() // 9, x.numel() // 2, x.numel() // 2]))


ONLY_32 = (torch.float32,)
FINITE = ("normal", "whole", "zeros")

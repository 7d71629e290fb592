"""One kernel or step at one place: what runs, its floor, and the reference it must agree with."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from thinwire.kernels import Picks, dispatch
from thinwire_lab.studies.kernels.material import Material

Call = Callable[[], Any]


@dataclass(frozen=True, kw_only=True)
class Place:
    """The place of a row: d elements, the share `density` that is kept, and the number of workers."""

    material: Material
    numel: int
    density: float
    workers: int

    @property
    def picks(self) -> int:
        """How many elements are kept (k)."""
        return min(self.numel, max(1, round(self.density * self.numel)))

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.material.device

    def gradient(self, number: int = 0) -> Tensor:
        """Return a standard normal vector (d)."""
        return self.material.gradient(self.numel, number)

    def threshold(self) -> Tensor:
        """Return the magnitude (0-dim) that a share `density` of normal numbers reaches."""
        share = torch.tensor(1 - self.picks / self.numel, dtype=torch.float64)
        return (torch.erfinv(share) * math.sqrt(2)).float().to(self.device)


@dataclass(frozen=True, kw_only=True)
class Work:
    """What runs, and what it is compared with.

    `outcome` computes anew what backend and reference must agree on; by default it calls `reset` and `run`. `others`
    are the torch expressions: "torch" is what a user would write, or else the reference itself, which is plain torch.
    `floor` counts `passes` times, because a GPU's floor is a number of copies. `bits` per kept element, if known.
    """

    run: Call
    floor: Call
    moved: int
    reset: Callable[[], object] = lambda: None
    outcome: Call | None = None
    alike: Callable[[Any, Any], bool] | None = None
    others: Mapping[str, Call] = field(default_factory=dict)
    passes: float = 1.0
    bits: float | None = None

    def agrees(self) -> bool:
        """Whether the backend agrees with the reference."""
        found = self._outcome()
        with by_reference():
            expected = self._outcome()
        return (self.alike or alike)(found, expected)

    def baselines(self) -> dict[str, Call]:
        """Return the torch expressions by name."""
        return {"torch": self._reference, **self.others}

    def _outcome(self) -> Any:
        if self.outcome is not None:
            return self.outcome()
        self.reset()
        return copied(self.run())

    def _reference(self) -> Any:
        with by_reference():
            return self.run()


@dataclass(frozen=True, kw_only=True)
class Case:
    """A row of the table at every size.

    `densities` and `workers` say whether these are swept. `density` is used where density is not swept; None if there
    is none. `most` is the largest size that is checked against the reference, or None for any.
    """

    make: Callable[[Place], Work]
    group: str
    floor: str
    baseline: str = "the reference"
    sweep: bool = False
    density: float | None = None
    workers: bool = False
    most: int | None = None


@contextmanager
def by_reference() -> Iterator[None]:
    """Run everything within on the reference kernels."""
    with patch.object(dispatch, "backend_of", lambda *_, **__: "reference"):
        yield


def copied(found: Any) -> Any:
    """Return a copy, because the next call may write to the same tensors."""
    if isinstance(found, Tensor):
        return found.clone()
    if isinstance(found, Picks):  # a GPU pads its fixed capacity with -1
        return copied((found.indices[found.indices >= 0], found.peak))
    return tuple(copied(each) for each in found) if isinstance(found, tuple | list) else found


def alike(found: Any, expected: Any) -> bool:
    """Whether integers are equal, and floats equal up to the order of summation."""
    if not isinstance(found, Tensor):
        if not isinstance(found, tuple):
            return bool(found == expected)
        return len(found) == len(expected) and all(map(alike, found, expected))
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    if not found.is_floating_point():
        return torch.equal(found, expected)
    return torch.allclose(found, expected, rtol=1e-5, atol=1e-5, equal_nan=True)

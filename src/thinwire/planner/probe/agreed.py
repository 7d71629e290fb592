"""Figures that all ranks hold alike, so that they decide alike."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from thinwire.collectives import Group, all_gather


def gathered(figures: Sequence[float], group: Group, device: torch.device | None = None) -> Tensor:
    """Return every rank's figures, a row for each rank, in float64 on the CPU."""
    mine = torch.tensor(list(figures), dtype=torch.float64, device=device).view(torch.uint8)
    rows = mine.new_empty(group.size() * mine.numel())
    all_gather(rows, mine, group).wait()
    return rows.cpu().view(torch.float64).view(group.size(), len(figures))


def longest(seconds: float, group: Group, device: torch.device | None = None) -> float:
    """Return the largest over ranks; also a way to start together."""
    return float(gathered([seconds], group, device).max())


@final
@dataclass(frozen=True, kw_only=True)
class Ranks:
    """Ranks that measure the same things, and where their tensors are."""

    group: Group
    device: torch.device

    def mean(self, figures: Sequence[float]) -> list[float]:
        """Return the means over ranks."""
        return gathered(figures, self.group, self.device).mean(dim=0).tolist()

    def least(self, figures: Sequence[float]) -> list[float]:
        """Return the smallest of all ranks."""
        return gathered(figures, self.group, self.device).min(dim=0).values.tolist()

    def most(self, figures: Sequence[float]) -> list[float]:
        """Return the largest of all ranks."""
        return gathered(figures, self.group, self.device).max(dim=0).values.tolist()

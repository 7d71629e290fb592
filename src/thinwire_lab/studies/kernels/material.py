"""The input numbers of every measurement."""

from functools import cached_property

import torch
from torch import Tensor

from thinwire import kernels

SHIFT = 16  # elements between two gradients: 64 bytes, so each starts on a cache line
GRADIENTS = 64


class Material:
    """Standard normal numbers. Gradients are stretches of them that begin a little apart; picks are far apart."""

    def __init__(self, numel: int, device: torch.device, seed: int = 0) -> None:
        self.device = device
        self._most, self._seed = numel, seed

    def gradient(self, numel: int, number: int = 0) -> Tensor:
        """Return a float32 vector; vectors of nearby numbers are independent element by element."""
        return self._base.narrow(0, number % GRADIENTS * SHIFT, numel)

    def picks(self, numel: int, count: int, worker: int, workers: int) -> tuple[Tensor, Tensor]:
        """Return indices (int32, ascending) and values of a worker's `count` largest magnitudes.

        All workers have the same vector, each rotated by another part of its length.
        """
        x = self.gradient(numel)
        indices = kernels.largest(x, count)
        turn = worker * numel // workers
        cut = int(torch.searchsorted(indices, torch.tensor(numel - turn, dtype=torch.int32, device=self.device)))
        turned = torch.cat((indices[cut:] + (turn - numel), indices[:cut] + turn))
        values = x.index_select(0, indices)
        return turned, torch.cat((values[cut:], values[:cut]))

    @cached_property
    def _base(self) -> Tensor:
        generator = torch.Generator(device=self.device).manual_seed(self._seed)
        return torch.randn(self._most + GRADIENTS * SHIFT, generator=generator, device=self.device)

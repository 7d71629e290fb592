"""A convex problem whose smoothness is known: logistic regression on MNIST."""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from thinwire_lab.papers.shared.material import Material
from thinwire_lab.problems import build


@dataclass(frozen=True, kw_only=True)
class Logistic:
    """Mean cross entropy of softmax(x · w), for images (n, 784) and labels (n); w is (784, 10)."""

    images: Tensor
    labels: Tensor

    @classmethod
    def mnist(cls, material: Material) -> Self:
        """Return the problem on 2,048 digits. Raises Absent without MNIST."""
        images, labels = _digits(material.folder("mnist"), material.seed)
        return cls(images=images, labels=labels)

    def zeros(self) -> Tensor:
        """Return the starting point."""
        return torch.zeros(self.images.shape[1], 10)

    def loss(self, w: Tensor) -> float:
        """Return f(w)."""
        return float(F.cross_entropy(self.images @ w, self.labels))

    def gradient(self, w: Tensor, part: slice | Tensor = slice(None)) -> Tensor:
        """Return the gradient over some of the images."""
        images, labels = self.images[part], self.labels[part]
        residual = torch.softmax(images @ w, dim=1) - F.one_hot(labels, 10)
        return images.T @ residual / len(images)

    @cached_property
    def smoothness(self) -> float:
        """L: half the largest eigenvalue of the images' second moment (Böhning 1992)."""
        return 0.5 * float(torch.linalg.matrix_norm(self.images, 2)) ** 2 / len(self.images)

    @property
    def largest_norm(self) -> float:
        """The norm of the longest image."""
        return float(self.images.norm(dim=1).max())


@lru_cache(maxsize=1)
def _digits(folder: Path, seed: int) -> tuple[Tensor, Tensor]:
    batches = [build("mlp", seed=seed, data=folder).batch(step, 0, 1) for step in range(32)]
    return torch.cat([images for images, _ in batches]), torch.cat([labels for _, labels in batches])

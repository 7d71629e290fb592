"""Advertisements shown: what is known of each, and whether it was clicked."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from thinwire.tools.problems.base import Batch
from thinwire.tools.problems.sampling import Indices

DENSE, CATEGORIES = 13, 26


@dataclass(frozen=True, kw_only=True)
class Impressions:
    """n of them: `dense` (n, 13) float32, `ids` (n, 26) of some integer type, and labels (n,), 1 for a click else 0."""

    dense: NDArray[np.float32]
    ids: NDArray[Any]
    labels: NDArray[Any]

    def take(self, indices: Indices) -> Batch:
        """Of those at `indices` (k,): dense (k, 13) float32, ids (k, 26) int64 and labels (k,) int64."""
        ids, labels = (array[indices].astype(np.int64) for array in (self.ids, self.labels))
        return torch.from_numpy(self.dense[indices]), torch.from_numpy(ids), torch.from_numpy(labels)


def scaled(counts: NDArray[Any]) -> NDArray[np.float32]:
    """log(1 + x) of counts, float32 of their shape; those below zero count as zero."""
    return np.log1p(np.maximum(counts, 0)).astype(np.float32)

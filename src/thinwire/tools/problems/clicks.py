"""Advertisements shown and clicked; and generated clicks, of which the best loss that any model can reach is known."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from thinwire.tools.problems.base import Batch
from thinwire.tools.problems.sampling import Indices

DENSE, CATEGORIES = 13, 26
ROWS = np.geomspace(4, 8000, CATEGORIES).astype(np.int64)
"""Distinct ids of every categorical feature, from 4 to 8,000."""

Floats = NDArray[np.float64]

# Of the features, these bear on a click: dense ones, ids on their own, and ids by the others they meet.
_SLOPED, _TELLING, _MEETING = np.arange(0, DENSE, 2), np.arange(0, CATEGORIES, 2), np.arange(1, 18, 3)
# About a quarter is clicked. The features on their own explain half of what can be explained, meetings the rest.
_SLOPE, _EFFECT, _AFFINITY, _WIDTH, _BIAS = 0.2, 0.3, 0.65, 4, -2.2
_STEEPNESS = 1.4  # such that most ids seen in a training of some thousand steps have been seen often


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


@dataclass(frozen=True, kw_only=True)
class Teacher:
    """A logistic model, the nature that clicks.

    Its logits are linear in the dense features, with `slopes` (13,) of which some are zero; on top come the `effects`
    (rows,) of the ids of half of the features, and the dot products of the `vectors` (rows, 4) of every two ids of a
    quarter of them. The rows of feature f begin at starts[f], `starts` (26,); from there on `bounds` (rows,) rises from
    f to f + 1 by the shares of its ids.
    """

    slopes: Floats
    starts: Indices
    bounds: Floats
    effects: Floats
    vectors: Floats

    def chances(self, shown: Impressions) -> Floats:
        """The probability of a click on each, (n,)."""
        rows = shown.ids + self.starts
        vectors = self.vectors[rows[:, _MEETING]]
        # Over all pairs the products sum to half of what the square of the sum has more than the sum of squares.
        met = (vectors.sum(1) ** 2 - (vectors**2).sum(1)).sum(1) / 2
        logits = _BIAS + (shown.dense - 1.0) @ self.slopes + self.effects[rows[:, _TELLING]].sum(1) + met
        return 1 / (1 + np.exp(-logits))

    def show(self, generator: np.random.Generator, count: int) -> Impressions:
        """`count` impressions, clicked at random with the teacher's probabilities; ids follow Zipf's law."""
        dense = scaled(np.floor(generator.lognormal(1.0, 1.0, (count, DENSE))))
        points = generator.random((count, CATEGORIES)) + np.arange(CATEGORIES)
        ids = np.searchsorted(self.bounds, points, side="right") - self.starts
        shown = Impressions(dense=dense, ids=ids, labels=np.zeros(count))
        return Impressions(dense=dense, ids=ids, labels=generator.random(count) < self.chances(shown))

    def draw(self, generator: np.random.Generator, count: int) -> Batch:
        """A batch of fresh impressions."""
        return self.show(generator, count).take(np.arange(count))


def teacher(nature: np.random.Generator) -> Teacher:
    """The teacher that `nature` draws."""
    ends = np.cumsum(ROWS)
    slopes = np.zeros(DENSE)
    slopes[_SLOPED] = _SLOPE * nature.choice([-1, 1], len(_SLOPED))
    return Teacher(
        slopes=slopes,
        starts=ends - ROWS,
        bounds=np.concatenate([feature + _shares(rows) for feature, rows in enumerate(ROWS)]),
        effects=nature.normal(0, _EFFECT, ends[-1]),
        vectors=nature.normal(0, _AFFINITY / _WIDTH**0.25, (ends[-1], _WIDTH)),
    )


def entropy(chances: Floats) -> float:
    """Mean entropy in nats of clicks of these probabilities: no model's expected loss is lower."""
    return float(-(chances * np.log(chances) + (1 - chances) * np.log1p(-chances)).mean())


def _shares(rows: int) -> Floats:
    """How often an id is at most the k-th (rows,): the k-th is k^-1.2 times as frequent as the first."""
    shares = np.cumsum(np.arange(1, rows + 1) ** -_STEEPNESS)
    return shares / shares[-1]

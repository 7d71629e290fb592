"""Advertisements and clicks on them; and generated clicks, for which we know the best loss any model can reach."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from thinwire_lab.problems.base import Batch
from thinwire_lab.problems.sampling import Indices

DENSE, CATEGORIES = 13, 26
ROWS = np.geomspace(4, 8000, CATEGORIES).astype(np.int64)
"""Distinct ids of every categorical feature, from 4 to 8,000."""

Floats = NDArray[np.float64]

# The features that bear on a click: dense ones, single ids, and ids in pairs.
_SLOPED, _TELLING, _MEETING = np.arange(0, DENSE, 2), np.arange(0, CATEGORIES, 2), np.arange(1, 18, 3)
# About a quarter is clicked. Single features explain half of what can be explained, pairs the rest.
_SLOPE, _EFFECT, _AFFINITY, _WIDTH, _BIAS = 0.2, 0.3, 0.65, 4, -2.2
_STEEPNESS = 1.4  # so that over some thousand training steps most ids seen have been seen often


@dataclass(frozen=True, kw_only=True)
class Impressions:
    """n impressions: `dense` (n, 13) float32, `ids` (n, 26) integers, and labels (n,), 1 for a click, else 0."""

    dense: NDArray[np.float32]
    ids: NDArray[Any]
    labels: NDArray[Any]

    def take(self, indices: Indices) -> Batch:
        """Return the impressions at `indices` (k,): dense (k, 13) float32, ids (k, 26) int64, labels (k,) int64."""
        ids, labels = (array[indices].astype(np.int64) for array in (self.ids, self.labels))
        return torch.from_numpy(self.dense[indices]), torch.from_numpy(ids), torch.from_numpy(labels)


def scaled(counts: NDArray[Any]) -> NDArray[np.float32]:
    """Return log(1 + x) of counts, in their shape and as float32; negative counts are taken as zero."""
    return np.log1p(np.maximum(counts, 0)).astype(np.float32)


@dataclass(frozen=True, kw_only=True)
class Teacher:
    """The logistic model that generates clicks.

    A logit has three parts: the dense features times `slopes` (13,), some of them zero; `effects` (rows,) of the ids of
    half of the features; and, for a quarter of the features, the dot products of the `vectors` (rows, 4) of every pair
    of ids. The rows of feature f begin at starts[f], with `starts` (26,); from there on `bounds` (rows,) rises from f
    to f + 1 by the shares of its ids.
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
        # Over all pairs, the products sum to half of (the square of the sum − the sum of squares).
        met = (vectors.sum(1) ** 2 - (vectors**2).sum(1)).sum(1) / 2
        logits = _BIAS + (shown.dense - 1.0) @ self.slopes + self.effects[rows[:, _TELLING]].sum(1) + met
        return 1 / (1 + np.exp(-logits))

    def show(self, generator: np.random.Generator, count: int) -> Impressions:
        """Draw `count` impressions, with clicks at the teacher's probabilities; ids follow Zipf's law."""
        dense = scaled(np.floor(generator.lognormal(1.0, 1.0, (count, DENSE))))
        points = generator.random((count, CATEGORIES)) + np.arange(CATEGORIES)
        ids = np.searchsorted(self.bounds, points, side="right") - self.starts
        shown = Impressions(dense=dense, ids=ids, labels=np.zeros(count))
        return Impressions(dense=dense, ids=ids, labels=generator.random(count) < self.chances(shown))

    def draw(self, generator: np.random.Generator, count: int) -> Batch:
        """Draw a batch of new impressions."""
        return self.show(generator, count).take(np.arange(count))


def teacher(nature: np.random.Generator) -> Teacher:
    """Draw a teacher from the generator `nature`."""
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
    """Mean entropy, in nats, of clicks with these probabilities. No model's expected loss is lower."""
    return float(-(chances * np.log(chances) + (1 - chances) * np.log1p(-chances)).mean())


def _shares(rows: int) -> Floats:
    """Cumulative shares of ids (rows,): the k-th is k^-1.4 times as frequent as the first."""
    shares = np.cumsum(np.arange(1, rows + 1) ** -_STEEPNESS)
    return shares / shares[-1]

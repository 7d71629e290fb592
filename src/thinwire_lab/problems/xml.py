"""A generated stand-in for extreme multi-label classification: a linear layer under sparse features."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from thinwire_lab.problems.base import Batch, Indices, Options, Problem, held_out, made

FEATURES, LABELS = 4096, 30_938
PROTOTYPES, TYPICAL, COMMON = 16, 32, 32
BATCH, HELD_OUT = 32, 384


@dataclass(frozen=True, kw_only=True)
class Documents:
    """n documents, each a list of words (n, 64), all below 4096, and a label (n,)."""

    words: Indices
    labels: Indices

    def take(self, indices: Indices) -> Batch:
        """Return term frequencies (k, 4096) float32, rows of unit length, and labels (k,) int64 at `indices`."""
        counts = np.zeros((len(indices), FEATURES), np.float32)
        np.add.at(counts, (np.arange(len(indices))[:, None], self.words[indices]), np.float32(1))
        counts /= np.linalg.norm(counts, axis=1, keepdims=True)
        return torch.from_numpy(counts), torch.from_numpy(self.labels[indices])


@dataclass(frozen=True, kw_only=True)
class Language:
    """Every label has 16 words typical of it, `typical` (labels, 16); labels and common words follow Zipf's law."""

    typical: Indices

    def write(self, generator: np.random.Generator, count: int) -> Documents:
        """`count` documents, each of 32 words typical of its label and 32 from the language at large."""
        labels = _zipf(generator, len(self.typical), (count,))
        chosen = generator.integers(PROTOTYPES, size=(count, TYPICAL))
        common = _zipf(generator, FEATURES, (count, COMMON))
        return Documents(words=np.hstack([self.typical[labels[:, None], chosen], common]), labels=labels)

    def draw(self, generator: np.random.Generator) -> Batch:
        """A batch of fresh documents."""
        return self.write(generator, BATCH).take(np.arange(BATCH))


def make(options: Options) -> Problem:
    """The problem with `options.scale` times as many labels as at full size, and at least two."""
    labels = max(2, round(LABELS * options.scale))
    # The language is the same for every seed, like a data set on disk; the seed draws the batches.
    nature = np.random.default_rng(0)
    language = Language(typical=nature.integers(FEATURES, size=(labels, PROTOTYPES)))
    rest = language.write(nature, HELD_OUT)
    return made(
        "xml",
        f"linear layer {FEATURES:,} -> {labels:,}",
        "generated sparse features",
        options=options,
        network=lambda: _network(labels),
        draw=language.draw,
        rest=held_out(np.arange(HELD_OUT), BATCH, rest.take),
    )


def _network(labels: int) -> nn.Linear:
    # Zero is a fine start for one layer, and drawing half a gigabyte of random numbers would take seconds.
    model = nn.Linear(FEATURES, labels, bias=False, device="meta").to_empty(device="cpu")
    nn.init.zeros_(model.weight)
    return model


def _zipf(generator: np.random.Generator, count: int, shape: tuple[int, ...]) -> Indices:
    """Numbers below `count`; k is 1 / (k + 1) times as likely as 0."""
    bounds = np.cumsum(1 / np.arange(1, count + 1))
    return np.searchsorted(bounds, generator.random(shape) * bounds[-1], side="right")

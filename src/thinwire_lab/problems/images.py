"""A classifier of CIFAR-10's images, whatever the network: what it trains on, and what is held out."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from thinwire_lab.problems.base import Batch, Options, Problem, cross_entropy, seeded, size
from thinwire_lab.problems.cifar import EXPECTED, Pixels, load
from thinwire_lab.problems.rates import RATES
from thinwire_lab.problems.sampling import Indices, batches, held_out, spaced

MEAN = np.array([125.3, 123.0, 113.9], np.float32)
STD = np.array([63.0, 62.1, 66.7], np.float32)
SIDE, MARGIN = 32, 4
BATCH, HELD_OUT = 32, 384


def classifier(options: Options, name: str, title: str, network: Callable[[], nn.Module]) -> Problem:
    """The problem on the CIFAR-10 file `options.data`; training images are flipped and shifted at random."""
    data = load(options.path(EXPECTED))
    with seeded(options.seed):
        model = network()

    def draw(generator: np.random.Generator) -> Batch:
        chosen = generator.choice(data.train, BATCH)
        return _batch(_augmented(data.pixels(chosen), generator), data.labels[chosen])

    def take(indices: Indices) -> Batch:
        return _batch(data.pixels(indices), data.labels[indices])

    return Problem(
        name=name,
        description=f"{title}, {size(model)}, on {data.source}",
        model=model,
        batch=batches(options.seed, draw),
        loss=cross_entropy,
        held_out=held_out(data.rest[spaced(len(data.rest), HELD_OUT)], BATCH, take),
        learning_rate=RATES[name].sgd,
    )


def _augmented(pixels: Pixels, generator: np.random.Generator) -> Pixels:
    """Pad each image with 4 black pixels, crop it at a random place, and mirror half of them on average."""
    padded = np.pad(pixels, ((0, 0), (MARGIN, MARGIN), (MARGIN, MARGIN), (0, 0)))
    image, window = np.arange(len(pixels))[:, None, None], np.arange(SIDE)
    rows, columns = generator.integers(2 * MARGIN + 1, size=(2, len(pixels), 1)) + window
    mirrored = generator.random((len(pixels), 1)) < 0.5
    columns = np.where(mirrored, columns[:, ::-1], columns)
    return padded[image, rows[:, :, None], columns[:, None, :]]


def _batch(pixels: Pixels, labels: NDArray[Any]) -> Batch:
    images = ((pixels - MEAN) / STD).transpose(0, 3, 1, 2)
    return torch.from_numpy(np.ascontiguousarray(images)), torch.from_numpy(labels.astype(np.int64))

"""A fully connected network on MNIST's idx files."""

import gzip
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from thinwire.bench.problems.base import Batch, Options, Problem, cross_entropy, seeded, size
from thinwire.bench.problems.reading import reading, require
from thinwire.bench.problems.sampling import Indices, batches, held_out, spaced

EXPECTED = "a directory with MNIST's four files, train-images-idx3-ubyte[.gz] and so on"
PIXELS, HIDDEN, CLASSES = 28 * 28, 1024, 10
BATCH, HELD_OUT = 64, 960


@dataclass(frozen=True, kw_only=True)
class Digits:
    """Images (n, 784) uint8 and their labels (n,) uint8."""

    images: NDArray[np.uint8]
    labels: NDArray[np.uint8]

    def take(self, indices: Indices) -> Batch:
        """Pixels (k, 784) float32 within [0, 1] and labels (k,) int64 of the images at `indices` (k,)."""
        pixels = self.images[indices].astype(np.float32) / np.float32(255)
        return torch.from_numpy(pixels), torch.from_numpy(self.labels[indices].astype(np.int64))

    def draw(self, generator: np.random.Generator) -> Batch:
        """A batch of images chosen at random, as `take` gives them."""
        return self.take(generator.integers(len(self.labels), size=BATCH))


def make(options: Options) -> Problem:
    """The problem on the directory `options.data`; the held-out images are evenly spaced ones of the test set."""
    folder = options.path(EXPECTED)
    train, test = _digits(folder, "train"), _digits(folder, "t10k")
    with seeded(options.seed):
        model = nn.Sequential(
            nn.Linear(PIXELS, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES)
        )
    return Problem(
        name="mlp",
        description=f"784-1024-1024-10 ReLU network, {size(model)}, on {len(train.labels):,} MNIST images",
        model=model,
        batch=batches(options.seed, train.draw),
        loss=cross_entropy,
        held_out=held_out(spaced(len(test.labels), HELD_OUT), BATCH, test.take),
        learning_rate=0.05,
    )


def _digits(folder: Path, part: str) -> Digits:
    images = _idx(folder, f"{part}-images-idx3-ubyte")
    labels = _idx(folder, f"{part}-labels-idx1-ubyte")
    require(images.shape == (len(labels), 28, 28), folder, f"as many {part} images of 28 x 28 pixels as labels")
    require(bool(np.all(labels < CLASSES)), folder, f"{part} labels from 0 to {CLASSES - 1}")
    return Digits(images=images.reshape(-1, PIXELS), labels=labels)


def _idx(folder: Path, name: str) -> NDArray[np.uint8]:
    plain, packed = folder / name, folder / f"{name}.gz"
    path = packed if packed.is_file() else plain
    with reading(path, EXPECTED):
        raw = path.read_bytes()
        raw = gzip.decompress(raw) if path == packed else raw
    return _unpack(raw, path)


def _unpack(raw: bytes, path: Path) -> NDArray[np.uint8]:
    """An idx file: two zero bytes, 8 for unsigned bytes, the rank, big-endian int32 sizes, then the items."""
    require(raw[:3] == b"\0\0\x08" and len(raw) >= 4 + 4 * raw[3], path, "an idx file of unsigned bytes")
    start = 4 + 4 * raw[3]
    shape = np.frombuffer(raw[4:start], ">i4").tolist()
    items = np.frombuffer(raw, np.uint8, offset=start)
    require(items.size == np.prod(shape), path, f"{'x'.join(map(str, shape))} items but found {items.size}")
    return items.reshape(shape)

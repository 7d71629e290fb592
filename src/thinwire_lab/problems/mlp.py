"""A fully connected network on MNIST's idx files."""

import gzip
import math
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from thinwire_lab.inputs import reading, require
from thinwire_lab.problems.base import Batch, Chain, Indices, Options, Parts, Problem, chosen, held_out, made, spaced

EXPECTED = "a directory with MNIST's four files, train-images-idx3-ubyte[.gz] and so on"
PIXELS, HIDDEN, CLASSES = 28 * 28, 1024, 10
BATCH, HELD_OUT = 64, 960


@dataclass(frozen=True, kw_only=True)
class Digits:
    """Images (n, 784) uint8 and their labels (n,) uint8."""

    images: NDArray[np.uint8]
    labels: NDArray[np.uint8]

    def take(self, indices: Indices) -> Batch:
        """Return pixels (k, 784) float32 in [0, 1] and labels (k,) int64 of the images at `indices` (k,)."""
        pixels = self.images[indices].astype(np.float32) / np.float32(255)
        return torch.from_numpy(pixels), torch.from_numpy(self.labels[indices].astype(np.int64))

    def draw(self, generator: np.random.Generator) -> Batch:
        """A batch of images chosen at random, as `take` gives them."""
        return self.take(generator.integers(len(self.labels), size=BATCH))


def make(options: Options) -> Problem:
    """The problem on the directory `options.data`; the held-out images are evenly spaced ones of the test set."""
    folder = options.path(EXPECTED)
    train, test = _digits(folder, "train"), _digits(folder, "t10k")
    return made(
        "mlp",
        "784-1024-1024-10 ReLU network",
        f"{len(train.labels):,} MNIST images",
        options=options,
        network=_network,
        draw=train.draw,
        rest=held_out(spaced(len(test.labels), HELD_OUT), BATCH, test.take),
        parts=Parts(split=_split),
    )


def _network() -> Chain:
    hidden = nn.Linear(PIXELS, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU()
    return Chain(*hidden, nn.Linear(HIDDEN, CLASSES))


def _split(model: nn.Module, stages: int) -> list[nn.Module]:
    """Cut after the first ReLU, and after the second."""
    chain = cast(Chain, model)
    return chosen("mlp", {2: [chain[:2], chain[2:]], 3: [chain[:2], chain[2:4], chain[4:]]}, stages)


def _digits(folder: Path, part: str) -> Digits:
    images = _idx(folder, f"{part}-images-idx3-ubyte", 3)
    labels = _idx(folder, f"{part}-labels-idx1-ubyte", 1)
    require(images.shape == (len(labels), 28, 28), folder, f"as many {part} images of 28 x 28 pixels as labels")
    require(len(labels) > 0 and int(labels.max()) < CLASSES, folder, f"{part} labels from 0 to {CLASSES - 1}")
    return Digits(images=images.reshape(-1, PIXELS), labels=labels)


def _idx(folder: Path, name: str, rank: int) -> NDArray[np.uint8]:
    plain, packed = folder / name, folder / f"{name}.gz"
    path = packed if packed.is_file() else plain
    with reading(path, EXPECTED):
        raw = path.read_bytes()
        return _unpack(gzip.decompress(raw) if path == packed else raw, path, rank)


def _unpack(raw: bytes, path: Path, rank: int) -> NDArray[np.uint8]:
    """An idx file: two zero bytes, 8 for unsigned bytes, the rank, big-endian sizes of 4 bytes, then the items."""
    start = 4 + 4 * rank
    require(raw[:4] == bytes((0, 0, 8, rank)) and len(raw) >= start, path, f"an idx file of rank {rank} of bytes")
    shape = np.frombuffer(raw[4:start], ">u4").tolist()
    items = np.frombuffer(raw, np.uint8, offset=start)
    require(items.size == math.prod(shape), path, f"{' x '.join(map(str, shape))} items, not {items.size}")
    return items.reshape(shape)

"""Classifiers of CIFAR-10's images, from a .npz file of pixels or of JPEG files."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from thinwire_lab.inputs import reading, require
from thinwire_lab.problems.base import Batch, Indices, Options, Problem, held_out, made, spaced

EXPECTED = "a .npz file, or a directory with one, that holds images and labels or jpeg, offsets, labels and split"
SHAPE, CLASSES = (32, 32, 3), 10

Pixels = NDArray[np.uint8]
Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, kw_only=True)
class Cifar:
    """Images with labels (n,) from 0 to 9, and the indices of the training and the held-out images.

    pixels: indices (k,) -> those images, uint8 (k, 32, 32, 3); JPEGs are decoded on request.
    """

    pixels: Callable[[Indices], Pixels]
    labels: NDArray[Any]
    train: Indices
    rest: Indices
    source: str


def load(path: Path) -> Cifar:
    """Load the data set at `path`: a .npz file, or the first by name in a directory. Raises BadInput for neither."""
    file = min(path.glob("*.npz"), default=path)
    require(is_zipfile(file), file, EXPECTED)
    with reading(file, EXPECTED), np.load(file) as archive:
        layout = next((layout for key, layout in LAYOUTS.items() if key in archive), _images)
        found = layout(archive, file)
    labels = found.labels
    require(set(labels.tolist()) <= set(range(CLASSES)), file, f"labels from 0 to {CLASSES - 1}")
    require(min(len(found.train), len(found.rest)) > 0, file, "images to train on and images to hold out")
    return found


def _images(arrays: Arrays, file: Path) -> Cifar:
    images, labels = arrays["images"], arrays["labels"]
    fits = images.dtype == np.uint8 and images.shape == (labels.size, *SHAPE)
    require(fits, file, f"images of type uint8 and shape {(labels.size, *SHAPE)}, one per label")
    order = np.arange(labels.size)
    cut = labels.size - labels.size // 10
    source = f"{labels.size:,} images in {file.name}"
    return Cifar(pixels=images.__getitem__, labels=labels, train=order[:cut], rest=order[cut:], source=source)


def _jpegs(arrays: Arrays, file: Path) -> Cifar:
    stream, offsets, labels, split = (arrays[key] for key in ("jpeg", "offsets", "labels", "split"))
    require(split.size == labels.size == offsets.size - 1, file, "a label and a split per JPEG, and one more offset")
    bounds = offsets.tolist()

    def pixels(indices: Indices) -> Pixels:
        return np.stack([_decode(stream[bounds[i] : bounds[i + 1]].tobytes(), file, i) for i in indices.tolist()])

    train, rest = np.flatnonzero(split == 0), np.flatnonzero(split == 1)
    return Cifar(pixels=pixels, labels=labels, train=train, rest=rest, source=f"{labels.size:,} JPEGs in {file.name}")


def _decode(jpeg: bytes, file: Path, index: int) -> Pixels:
    # Pillow belongs to the bench extra, and only this layout needs it.
    from PIL import Image

    with reading(file, f"a JPEG as image {index}"):
        image = np.asarray(Image.open(BytesIO(jpeg)).convert("RGB"))
    require(image.shape == SHAPE, file, f"32 x 32 pixels in image {index}")
    return image


LAYOUTS: dict[str, Callable[[Arrays, Path], Cifar]] = {"images": _images, "jpeg": _jpegs}


MEAN = np.array([125.3, 123.0, 113.9], np.float32)
STD = np.array([63.0, 62.1, 66.7], np.float32)
SIDE, MARGIN = 32, 4
BATCH, HELD_OUT = 32, 384


def classifier(options: Options, name: str, title: str, network: Callable[[], nn.Module]) -> Problem:
    """The problem on the CIFAR-10 file `options.data`; training images are flipped and shifted at random."""
    data = load(options.path(EXPECTED))

    def draw(generator: np.random.Generator) -> Batch:
        chosen = generator.choice(data.train, BATCH)
        return _batch(_augmented(data.pixels(chosen), generator), data.labels[chosen])

    def take(indices: Indices) -> Batch:
        return _batch(data.pixels(indices), data.labels[indices])

    rest = held_out(data.rest[spaced(len(data.rest), HELD_OUT)], BATCH, take)
    return made(name, title, data.source, options=options, network=network, draw=draw, rest=rest)


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


CHANNELS, VGG_DENSE = (3, 16, 32, 64), (1024, 1024, 512)


def vgg() -> nn.Sequential:
    """Images (batch, 3, 32, 32) to logits (batch, 10)."""
    blocks = [part for pair in pairwise(CHANNELS) for part in _block(*pair)]
    dense = [part for pair in pairwise(VGG_DENSE) for part in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*blocks, nn.Flatten(), *dense, nn.Linear(VGG_DENSE[-1], CLASSES))


make_vgg = partial(classifier, name="vgg", title="small VGG", network=vgg)
"""The problem on the CIFAR-10 file `options.data`."""


def _block(inputs: int, outputs: int) -> list[nn.Module]:
    """Return a convolution after which height and width are halved."""
    return [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)]


class Residual(nn.Module):
    """Two 3 x 3 convolutions, and a shortcut that only subsamples the image and pads it with zero channels."""

    def __init__(self, inputs: int, outputs: int) -> None:
        """From `inputs` to `outputs` channels; if they differ, height and width are halved."""
        super().__init__()
        self.stride, self.added = (1 if inputs == outputs else 2), outputs - inputs
        self.body = nn.Sequential(
            *_convolution(inputs, outputs, self.stride), nn.ReLU(), *_convolution(outputs, outputs, 1)
        )

    def forward(self, images: Tensor) -> Tensor:
        """(batch, inputs, height, width) to (batch, outputs, height / stride, width / stride)."""
        around = F.pad(images[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.added))
        return F.relu(around + self.body(images))


def resnet20() -> nn.Sequential:
    """Images (batch, 3, 32, 32) to logits (batch, 10)."""
    widths = [16] * 4 + [32] * 3 + [64] * 3
    blocks = [Residual(*pair) for pair in pairwise(widths)]
    tail = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, CLASSES)]
    model = nn.Sequential(*_convolution(3, 16, 1), nn.ReLU(), *blocks, *tail)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return model


make_resnet20 = partial(classifier, name="resnet20", title="ResNet-20", network=resnet20)
"""The problem on the CIFAR-10 file `options.data`."""


def _convolution(inputs: int, outputs: int, stride: int) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False), nn.BatchNorm2d(outputs)]

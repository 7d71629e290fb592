"""CIFAR-10 from a .npz file, of pixels or of JPEG files."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import numpy as np
from numpy.typing import NDArray

from thinwire_lab.inputs import reading, require
from thinwire_lab.problems.base import Indices

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

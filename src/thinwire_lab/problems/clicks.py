"""Advertisements and clicks on them; and generated clicks, for which we know the best loss any model can reach."""

import gzip
import re
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import torch
from numpy.typing import NDArray

from thinwire_lab.inputs import BadInput, reading, require
from thinwire_lab.problems.base import Batch, Indices

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


EXPECTED = (
    f"a text file, or a .gz of one, with a label 0 or 1, {DENSE} integers and {CATEGORIES} hashes of 8 hexadecimal "
    "digits a line, separated by tabs; integers and hashes may be missing"
)
LINES, DAYS = 500_000, 7
"""How many lines we read at most, from the start, and the days they count as. The last day is held out."""
CRITEO_ROWS = 10_000
"""Ids per categorical feature: 0 if it is missing, otherwise 1 + its hash modulo 9,999."""

_LONGEST = 1024  # a valid line has at most 511 bytes
_KINDS = (
    ("0 or 1", re.compile(rb"[01]")),
    *(("an integer of at most 18 digits, or nothing", re.compile(rb"(?:-?\d{1,18})?")),) * DENSE,
    *(("8 hexadecimal digits, or nothing", re.compile(rb"(?:[\da-fA-F]{8})?")),) * CATEGORIES,
)
_LINE = re.compile(rb"\t".join(kind.pattern for _, kind in _KINDS))


def load(path: Path) -> Impressions:
    """Load the first lines of the file. Raises BadInput if it cannot be read or lines have another layout."""
    labels, counts, hashes, missing = bytearray(), array("q"), bytearray(), bytearray()
    with reading(path, EXPECTED), cast(BinaryIO, gzip.open(path) if path.suffix == ".gz" else path.open("rb")) as file:
        for fields in _lines(path, file):
            labels.append(fields[0] == b"1")
            counts.extend([int(field or 0) for field in fields[1 : 1 + DENSE]])
            hashes += bytes.fromhex(b"".join([field or b"00000000" for field in fields[1 + DENSE :]]).decode())
            missing += bytes([not field for field in fields[1 + DENSE :]])
    require(len(labels) >= DAYS, path, f"at least {DAYS} lines, not {len(labels)}: {EXPECTED}")
    rows = np.frombuffer(hashes, ">u4") % (CRITEO_ROWS - 1) + 1
    ids = np.where(np.frombuffer(missing, np.bool_), 0, rows).astype(np.int32)
    dense = scaled(np.frombuffer(counts, np.int64))
    return Impressions(
        dense=dense.reshape(-1, DENSE), ids=ids.reshape(-1, CATEGORIES), labels=np.frombuffer(labels, np.uint8)
    )


def _lines(path: Path, file: BinaryIO) -> Iterator[list[bytes]]:
    """Yield the columns of every line."""
    # Another kind of file may have no line ends, and a single line that exceeds memory.
    lines = iter(lambda: file.readline(_LONGEST), b"")
    for number, line in enumerate(islice(lines, LINES), 1):
        text = line.rstrip(b"\r\n")
        fields = text.split(b"\t")
        if not _LINE.fullmatch(text):
            raise BadInput(f"{path} line {number}: {_fault(fields)}; expected {EXPECTED}")
        yield fields


def _fault(fields: list[bytes]) -> str:
    if len(fields) != len(_KINDS):
        return f"{len(fields)} columns, not {len(_KINDS)}"
    column, field, kind = next(
        (column, field, kind)
        for column, (field, (kind, pattern)) in enumerate(zip(fields, _KINDS, strict=True), 1)
        if not pattern.fullmatch(field)
    )
    return f"column {column} is {field[:20].decode('ascii', 'backslashreplace')!r}, not {kind}"

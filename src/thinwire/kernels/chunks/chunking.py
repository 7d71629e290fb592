"""How a tensor is cut into chunks, and the transform of each: what codec, payload and kernels must agree on."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod, sqrt
from typing import Literal, Self

import torch
from torch import Tensor

from thinwire.kernels.exact.reference import turns
from thinwire.kernels.hashing.reference import mix
from thinwire.kernels.memory import kept, sent

Transform = Literal["dct", "hadamard"] | None
_NARROWEST = 4
_FLAT = 4


@dataclass(frozen=True)
class Chunking:
    """A flat tensor of `numel` elements, read as a matrix of `columns` columns and cut into chunks.

    A chunk has `height` rows and `width` columns, and `width` divides `columns`. Rows beyond the tensor's end are zero.
    Chunks are numbered row by row, and so are the coefficients of a chunk. `kept` coefficients of each chunk travel.
    """

    numel: int
    columns: int
    height: int
    width: int
    kept: int
    transform: Transform

    def __hash__(self) -> int:
        """Worked out once: plans of buckets are looked up by it, several times a step."""
        return self._hash

    @cached_property
    def _hash(self) -> int:
        kind = {"dct": 1, "hadamard": 2, None: 0}[self.transform]  # a word's hash differs from process to process
        return hash((self.numel, self.columns, self.height, self.width, self.kept, kind))

    @classmethod
    def of(cls, shape: tuple[int, ...], chunk: int, transform: Transform, kept: Callable[[int], int]) -> Self:
        """Cut a tensor of `shape` (rows, …) into chunks of at most `chunk` rows and columns.

        The width is the largest divisor of the columns. Vectors, and matrices whose width would be below 4, are cut
        into runs of at most 4 · `chunk` elements. The Hadamard transform takes powers of two only. `kept` says how many
        coefficients of a chunk's n travel.
        """
        numel, rows = prod(shape), shape[0]
        columns = numel // max(1, rows)
        height, width = _fair(rows, chunk, transform), _divisor(columns, chunk, transform)
        if rows == 1 or min(width, columns) < _NARROWEST:
            height, width = 1, _fair(numel, _FLAT * chunk, transform)
            columns = width
        return cls(numel, columns, height, width, kept(height * width), transform)

    @cached_property
    def size(self) -> int:
        """How many elements a chunk has, padding included."""
        return self.height * self.width

    @cached_property
    def across(self) -> int:
        """How many chunks lie side by side."""
        return self.columns // self.width

    @cached_property
    def down(self) -> int:
        """How many rows of chunks there are."""
        return -(-self.numel // (self.columns * self.height))

    @cached_property
    def chunks(self) -> int:
        """How many chunks there are."""
        return self.across * self.down

    @cached_property
    def count(self) -> int:
        """How many coefficients travel."""
        return self.chunks * self.kept

    def axes(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return A (height, height) and B (width, width), of the dtype and device of `like`: Z = A·X·Bᵀ."""
        a, b = (_matrix_on(size, self.transform, like.dtype, like.device) for size in (self.height, self.width))
        return a, b


@lru_cache(maxsize=256)
def matrix(size: int, transform: Transform) -> Tensor:
    """Return an orthonormal transform as a matrix (size, size), float64: the same bits on every processor.

    dct: DCT-II, √(2/n)·cos(π(2j + 1)i/2n), and √(1/n) for i = 0. hadamard: Sylvester's matrix/√n, its columns times
    fixed random signs, the same on all ranks and at all steps, so that coefficients may be summed. None: the identity.
    Of size 1, each is 1.
    """
    i, j = torch.arange(size, device="cpu")[:, None], torch.arange(size, device="cpu")[None, :]
    if transform is None or size == 1:
        return torch.eye(size, dtype=torch.float64, device="cpu")
    if transform == "dct":
        cosines = turns(4 * size, torch.float64)[0][(2 * j + 1) * i % (4 * size)] * sqrt(2 / size)
        return torch.where(i == 0, sqrt(1 / size), cosines)
    signs = 1 - 2 * (mix(j, size) & 1)
    ones = torch.stack([(i & j) >> bit & 1 for bit in range(max(1, size.bit_length()))]).sum(0)
    return signs * (1 - 2 * (ones % 2)).double() / sqrt(size)


@kept
def _matrix_on(size: int, transform: Transform, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a transform on a device."""
    return sent(matrix(size, transform).to(dtype), device)


def _fair(length: int, most: int, transform: Transform) -> int:
    """Return the length of equal parts, as few as possible, of at most `most` each."""
    if transform == "hadamard":
        return min(_power(most), 1 << max(0, length - 1).bit_length())
    return max(1, -(-length // max(1, -(-length // most))))


def _divisor(length: int, most: int, transform: Transform) -> int:
    if transform == "hadamard":
        return min(_power(most), length & -length)
    return max(d for d in range(1, most + 1) if length % d == 0)


def _power(most: int) -> int:
    return 1 << (most.bit_length() - 1)

"""Sorted positions as numbers of a few bits, and back: sums of binomials, and searches for them."""

from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinwire.kernels import simd
from thinwire.kernels.compiled import compiled
from thinwire.kernels.ranges import map_ranges
from thinwire.kernels.subsets.numbering import Numbering

Array = np.ndarray[Any, Any]
_WORD = 64
_LAST = np.iinfo(np.int64).max


def subsets_encode(positions: Tensor, numbering: Numbering) -> Tensor:
    """See `reference.subsets_encode`."""
    kept, bits, places = numbering.kept, numbering.bits, positions.numpy()
    binomials = numbering.table(positions).numpy()
    nbytes = -(-positions.numel() // kept * bits // 8)
    words = np.zeros(nbytes // 8 + 2, np.dtype("<u8"))

    def run(lo: int, hi: int) -> None:
        _number_loop(places, binomials, bits, lo // kept, hi // kept, words)

    map_ranges(run, positions.numel(), align=_WORD * kept)
    return torch.from_numpy(words.view(np.uint8)[:nbytes])


def subsets_decode(rows: Tensor, count: int, numbering: Numbering) -> Tensor:
    """See `reference.subsets_decode`."""
    kept, bits, (binomials, marks) = numbering.kept, numbering.bits, _searched(numbering)
    words = np.zeros((rows.shape[0], rows.shape[1] // 8 + 2), np.dtype("<u8"))
    words.view(np.uint8)[:, : rows.shape[1]] = rows.numpy()
    positions, subsets = np.empty((rows.shape[0], count * kept), np.int16), np.uint64(numbering.subsets)
    for row, out in zip(words, positions, strict=True):

        def run(lo: int, hi: int, row: Array = row, out: Array = out) -> bool:
            return bool(_subset_loop(row, binomials, marks, bits, subsets, lo // kept, hi // kept, out))

        good, used = map_ranges(run, count * kept, align=kept), count * bits
        if not all(good) or row[used // 64] >> np.uint64(used % 64) or row[used // 64 + 1 :].any():
            out.fill(-1)
    return torch.from_numpy(positions)


@lru_cache(maxsize=64)
def _searched(numbering: Numbering) -> tuple[Array, Array]:
    """Return the binomials C(p, i + 1), row by row, and every 16th of them; rows are padded with the largest number."""
    binomials = _widened(numbering.table(torch.empty(0)).numpy())
    return binomials, _widened(binomials[:, :: simd.SOME])


def _widened(rows: Array) -> Array:
    return np.pad(rows, ((0, 0), (0, -rows.shape[1] % simd.SOME)), constant_values=_LAST)


@compiled
def _number_loop(positions, binomials, bits, first, last, words):
    kept = binomials.shape[0]
    for chunk in range(first, last):
        number = np.int64(0)
        for i in range(kept):
            number += binomials[i, positions[chunk * kept + i]]
        word, shift = chunk * bits >> 6, np.uint64(chunk * bits & 63)
        words[word] |= np.uint64(number) << shift
        if np.int64(shift) + bits > 64:
            words[word + 1] |= np.uint64(number) >> (np.uint64(64) - shift)


@compiled
def _subset_loop(words, binomials, marks, bits, subsets, first, last, positions):
    # Returns False if a number belongs to no subset.
    kept, ones = binomials.shape[0], (np.uint64(1) << np.uint64(bits)) - np.uint64(1)
    for chunk in range(first, last):
        word, shift = chunk * bits >> 6, np.uint64(chunk * bits & 63)
        number = words[word] >> shift
        if np.int64(shift) + bits > 64:
            number |= words[word + 1] << (np.uint64(64) - shift)
        number &= ones
        if number >= subsets:
            return False
        rest = np.int64(number)
        for i in range(kept - 1, -1, -1):
            p = _last_within(binomials, marks, i, rest)
            rest -= binomials[i, p]
            positions[chunk * kept + i] = p
    return True


@compiled
def _last_within(binomials, marks, i, number):
    # The largest p whose binomial is at most the number: which 16th, then which of its 16. Without a branch to guess.
    within = np.int64(0)
    for j in range(0, marks.shape[1], simd.SOME):
        within += simd.at_most(marks, i * marks.shape[1] + j, number)
    begin = simd.SOME * (within - 1)
    return begin + simd.at_most(binomials, i * binomials.shape[1] + begin, number) - 1

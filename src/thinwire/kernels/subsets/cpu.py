"""Sorted positions as numbers of a few bits, and back: sums of binomials, and searches for them."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinwire.kernels import simd
from thinwire.kernels.compiled import compiled
from thinwire.kernels.parts import Array
from thinwire.kernels.ranges import map_ranges
from thinwire.kernels.subsets.reference import DIGIT, Numbered, Numbering, digits_of, table_of

_WORD = 64
_SPARE = 3
"""How many words lie beyond those of whole numbers, as a number is read with those that follow."""
_DIGIT, _ONE, _MOST = np.uint64(DIGIT), np.uint64(1), np.uint64((1 << DIGIT) - 1)
_LAST = np.iinfo(np.int64).max


def subsets_encode(positions: Tensor, runs: tuple[Numbered, ...]) -> Tensor:
    parts = positions.split([run.positions for run in runs])
    packed = [_packed(part.view(run.regions, -1), run.numbering) for part, run in zip(parts, runs, strict=True)]
    return packed[0] if len(packed) == 1 else torch.cat(packed)


def _packed(positions: Tensor, numbering: Numbering) -> Tensor:
    """Return the bytes of a run. Rows of whole bytes are as good as one row."""
    kept, bits, rows = numbering.kept, numbering.bits, len(positions)
    nbytes, apart = divmod(positions.shape[1] // kept * bits, 8)
    places = positions.numpy().reshape(rows if apart else 1, -1)
    nbytes = nbytes + 1 if apart else nbytes * rows
    words = np.zeros((len(places), nbytes // 8 + _SPARE), np.dtype("<u8"))
    binomials = table_of(numbering, positions.device).numpy()

    def run(lo: int, hi: int) -> None:
        _number_loop(places, binomials, bits, lo // kept, hi // kept, words)

    room = -(-places.shape[1] // (_WORD * kept)) * _WORD * kept  # or two threads would write to one word
    map_ranges(run, len(places) * room, align=_WORD * kept)
    return torch.from_numpy(np.ascontiguousarray(words.view(np.uint8)[:, :nbytes]).reshape(-1))


def subsets_decode(rows: Tensor, count: int, numbering: Numbering) -> Tensor:
    kept, bits = numbering.kept, numbering.bits
    loop, tables = _searching(numbering)
    words = np.zeros((rows.shape[0], rows.shape[1] // 8 + _SPARE), np.dtype("<u8"))
    words.view(np.uint8)[:, : rows.shape[1]] = rows.numpy()
    positions = np.empty((rows.shape[0], count * kept), np.int16)

    def run(lo: int, hi: int) -> None:
        loop(words, *tables, bits, lo // kept, hi // kept, positions)

    map_ranges(run, positions.size, align=kept)
    word, shift = divmod(count * bits, 64)
    spare = (words[:, word] >> np.uint64(shift) != 0) | words[:, word + 1 :].any(axis=1)
    positions[spare | (positions < 0).any(axis=1)] = -1
    return torch.from_numpy(positions)


@lru_cache(maxsize=64)
def _searching(numbering: Numbering) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """Return the loop that finds subsets, and what it wants: binomials, and how many subsets there are."""
    table = table_of(numbering, torch.device("cpu")).numpy()
    if numbering.digits > 1:
        return _long_subset_loop, (table, np.array(digits_of(numbering.subsets, 2)))
    binomials = _widened(table[0])
    return _subset_loop, (binomials, _widened(binomials[:, :: simd.SOME]), np.uint64(numbering.subsets))


def _widened(rows: Array) -> Array:
    # Rows are padded with the largest number.
    return np.pad(rows, ((0, 0), (0, -rows.shape[1] % simd.SOME)), constant_values=_LAST)


@compiled
def _number_loop(positions, binomials, bits, first, last, words):
    # A word that a number does not reach is not touched: it may be another thread's.
    kept, count, long = binomials.shape[1], positions.shape[1] // binomials.shape[1], len(binomials) > 1
    room = max(1, -(-count // _WORD)) * _WORD
    for row in range(first // room, -(-last // room)):
        begin = row * room
        for at in range(max(first - begin, 0), min(last - begin, count)):
            low, high = np.uint64(0), np.uint64(0)
            for i in range(kept):
                p = positions[row, at * kept + i]
                low += np.uint64(binomials[0, i, p])
                if long:
                    high += np.uint64(binomials[1, i, p]) + (low >> _DIGIT)
                    low &= _MOST
            low, high = low | high << _DIGIT, high >> _ONE
            word, shift = at * bits >> 6, np.uint64(at * bits & 63)
            words[row, word] |= low << shift
            if np.int64(shift) + bits > 64:
                words[row, word + 1] |= (low >> (np.uint64(63) - shift) >> _ONE) | high << shift
            if np.int64(shift) + bits > 128:
                words[row, word + 2] |= high >> (np.uint64(64) - shift)


@compiled
def _long_subset_loop(words, binomials, subsets, bits, first, last, positions):
    # Of two digits. Positions descend as they are found, so each search goes on where the last one ended.
    # Where a number belongs to no subset, its first position is −1.
    kept, space = binomials.shape[1:]
    count = max(1, positions.shape[1] // kept)
    for row in range(first // count, -(-last // count)):
        begin = row * count
        for at in range(max(first - begin, 0), min(last - begin, count)):
            word, shift = at * bits >> 6, np.uint64(at * bits & 63)
            both = _bits_from(words, row, word, shift), _bits_from(words, row, word + 1, shift)
            low, high = np.int64(both[0] & _MOST), np.int64(both[0] >> _DIGIT | both[1] << _ONE) & _rest_of(bits)
            if bits < 63:
                low &= _rest_of(bits + 63)
            if not _below(low, high, subsets[0], subsets[1]):
                positions[row, at * kept] = -1
                continue
            p = space - 1
            for i in range(kept - 1, -1, -1):
                while _below(low, high, binomials[0, i, p], binomials[1, i, p]):
                    p -= 1
                positions[row, at * kept + i] = p
                low -= binomials[0, i, p]
                high -= binomials[1, i, p] + (low < 0)
                low &= np.int64(_MOST)


@compiled
def _below(low, high, lower, higher):
    return high < higher or (high == higher and low < lower)


@compiled
def _bits_from(words, row, word, shift):
    # The 64 bits from one on.
    return words[row, word] >> shift | words[row, word + 1] << (np.uint64(63) - shift) << _ONE


@compiled
def _rest_of(bits):
    # Ones, as many as a number has bits above its lowest digit.
    return (np.int64(1) << max(np.int64(0), np.int64(bits) - 63)) - 1


@compiled
def _subset_loop(words, binomials, marks, subsets, bits, first, last, positions):
    # Where a number belongs to no subset, its first position is −1.
    kept, ones = binomials.shape[0], (np.uint64(1) << np.uint64(bits)) - np.uint64(1)
    count = max(1, positions.shape[1] // kept)
    for row in range(first // count, -(-last // count)):
        begin = row * count
        for at in range(max(first - begin, 0), min(last - begin, count)):
            word, shift = at * bits >> 6, np.uint64(at * bits & 63)
            number = words[row, word] >> shift
            if np.int64(shift) + bits > 64:
                number |= words[row, word + 1] << (np.uint64(64) - shift)
            number &= ones
            if number >= subsets:
                positions[row, at * kept] = -1
                continue
            rest = np.int64(number)
            for i in range(kept - 1, -1, -1):
                p = _last_within(binomials, marks, i, rest)
                rest -= binomials[i, p]
                positions[row, at * kept + i] = p


@compiled
def _last_within(binomials, marks, i, number):
    # The largest p whose binomial is at most the number: which 16th, then which of its 16. Without a branch to guess.
    within = np.int64(0)
    for j in range(0, marks.shape[1], simd.SOME):
        within += simd.at_most(marks, i * marks.shape[1] + j, number)
    begin = simd.SOME * (within - 1)
    return begin + simd.at_most(binomials, i * binomials.shape[1] + begin, number) - 1

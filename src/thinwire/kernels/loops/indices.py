"""Ascending indices in little more than the bits they hold."""

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from thinwire.kernels.loops.compiled import compiled

_intrinsic: Callable[..., Any] = intrinsic


@_intrinsic
def _trailing_zeros(typing, word):
    # Of a word that is not 0.
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return types.uint64(types.uint64), generate


@_intrinsic
def _ones(typing, word):
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ctpop(args[0])

    return types.int64(types.uint64), generate


@compiled
def elias_fano_encode(indices, low_bits, low, unary):
    mask = (1 << low_bits) - 1
    word, filled, place = np.uint64(0), 0, 0
    for i in range(indices.size):
        index = np.int64(indices[i])
        at = (index >> low_bits) + i
        unary[at >> 6] |= np.uint64(1) << np.uint64(at & 63)
        rest = np.uint64(index & mask)
        word |= rest << np.uint64(filled)
        filled += low_bits
        if filled >= 64:
            low[place] = word
            place += 1
            filled -= 64
            word = rest >> np.uint64(low_bits - filled) if filled else np.uint64(0)
    if filled:
        low[place] = word


@compiled
def elias_fano_decode(words, start, low_bits, space, indices):
    # `false` where encode cannot have written this; ones too many would otherwise be written beyond the end.
    i, bit, before, falling = np.int64(0), np.uint64(0), np.int64(0), False
    mask, step = np.uint64((1 << low_bits) - 1), np.uint64(low_bits)
    for place in range(start, words.size):
        word, base = words[place], np.int64(place - start) * 64 - i
        if i + _ones(word) > indices.size:
            return False
        while word:
            high = base + np.int64(_trailing_zeros(word))
            index = high << low_bits
            if low_bits:
                index |= np.int64(_bits_at(words, bit) & mask)
            word &= word - np.uint64(1)
            falling |= index < before
            indices[i] = before = index
            i, base, bit = i + 1, base - 1, bit + step
    tail = bit & np.uint64(63)
    padding = words[bit >> np.uint64(6)] >> tail if tail else np.uint64(0)
    return i == indices.size and not falling and before < max(space, 1) and padding == 0


@compiled
def _bits_at(words, bit):
    # The word after the last low one is the first of the unary part, so there always is a next one.
    place, shift = bit >> np.uint64(6), bit & np.uint64(63)
    return words[place] >> shift | words[place + np.uint64(1)] << np.uint64(1) << (np.uint64(63) - shift)

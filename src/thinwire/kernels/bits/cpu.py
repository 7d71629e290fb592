"""Packed numbers of a few bits each, and ascending indices in little more than the fewest bits possible."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinwire.kernels import simd
from thinwire.kernels.bits.reference import EliasFano
from thinwire.kernels.bits.vectors import MOST, packing, unpacking
from thinwire.kernels.compiled import compiled
from thinwire.kernels.ranges import map_pieces, map_ranges

_NUMPY: dict[torch.dtype, Any] = {torch.uint8: np.uint8, torch.int16: np.int16, torch.int32: np.int32}
_WORD = np.dtype("<u8")


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """See `reference.pack_bits`. At 8 bits, uint8 codes are returned as they are."""
    if bits == 8:
        return codes.to(torch.uint8)
    nbytes = -(-codes.numel() * bits // 8)
    words = np.empty(-(-nbytes // 4), np.dtype("<u4"))
    numbers, packed = codes.numpy(), words.view(np.uint8)

    def run(lo: int, hi: int) -> None:
        done = packing(bits)(numbers, lo, hi, packed) if bits <= MOST else lo
        _pack_loop(numbers, bits, done, hi, words)

    map_ranges(run, codes.numel(), align=32)
    return torch.from_numpy(words.view(np.uint8)[:nbytes])


def unpack_bits(buffer: Tensor, count: int, bits: int, dtype: torch.dtype = torch.int16) -> Tensor:
    """See `reference.unpack_bits`. At 8 bits, uint8 codes are a view of the buffer."""
    if bits == 8:
        return buffer[:count].to(dtype)
    codes, data = np.empty(count, _NUMPY[dtype]), buffer.numpy()

    def run(lo: int, hi: int) -> None:
        done = unpacking(bits)(data, lo, hi, codes) if bits <= MOST else lo
        _unpack_loop(data, bits, done, hi, codes)

    map_ranges(run, count, align=32)
    return torch.from_numpy(codes)


def ones(bits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    places = bits.nonzero().view(-1).to(torch.int32)
    missing = max(0, count - places.numel())
    return torch.nn.functional.pad(places[:count], (0, missing), value=-1), torch.tensor(places.numel())


def elias_fano_encode(indices: Tensor, space: int) -> Tensor:
    layout = EliasFano.of(indices.numel(), space)
    words = np.zeros(layout.nbytes // 8, _WORD)
    _elias_fano_encode_loop(indices.numpy(), layout.low_bits, words, words[layout.low_nbytes // 8 :])
    return torch.from_numpy(words.view(np.uint8))


def elias_fano_decode(buffer: Tensor, count: int, space: int) -> Tensor:
    return elias_fano_decode_rows(buffer[None], count, space)[0]


def elias_fano_decode_rows(rows: Tensor, count: int, space: int) -> Tensor:
    """See `reference.elias_fano_decode_rows`; rows are decoded in parallel."""
    layout, found = EliasFano.of(count, space), np.empty((len(rows), count), np.int32)

    def run(row: int) -> None:
        indices = found[row]
        if not _elias_fano_decode_loop(_words(rows[row]), layout.low_nbytes // 8, layout.low_bits, space, indices):
            indices.fill(-1)

    map_pieces(run, list(found))
    return torch.from_numpy(found)


def _words(buffer: Tensor) -> np.ndarray[Any, Any]:
    """View bytes as 8-byte words. Bytes that are not aligned are copied first."""
    return (buffer.clone() if buffer.data_ptr() % 8 else buffer).numpy().view(_WORD)


@compiled
def _pack_loop(codes, bits, lo, hi, out):
    # Each multiple of 32 codes begins at a 32-bit word.
    low = np.uint64((1 << bits) - 1)
    word, filled, place = np.uint64(0), 0, lo // 32 * bits
    for i in range(lo, hi):
        word |= (np.uint64(codes[i]) & low) << np.uint64(filled)
        filled += bits
        if filled >= 32:
            out[place] = np.uint32(word & np.uint64(0xFFFFFFFF))
            word >>= np.uint64(32)
            filled -= 32
            place += 1
    if filled:
        out[place] = np.uint32(word)


@compiled
def _unpack_loop(buffer, bits, lo, hi, out):
    low = np.uint64((1 << bits) - 1)
    word, filled, place = np.uint64(0), 0, lo // 8 * bits
    for i in range(lo, hi):
        while filled < bits:
            word |= np.uint64(buffer[place]) << np.uint64(filled)
            filled += 8
            place += 1
        out[i] = word & low
        word >>= np.uint64(bits)
        filled -= bits


@compiled
def _elias_fano_encode_loop(indices, low_bits, low, unary):
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
def _elias_fano_decode_loop(words, start, low_bits, space, indices):
    # Returns False if encode cannot have written this. The check in the loop keeps writes within `indices`.
    i, bit, before, falling = np.int64(0), np.uint64(0), np.int64(0), False
    mask, step = np.uint64((1 << low_bits) - 1), np.uint64(low_bits)
    for place in range(start, words.size):
        word, base = words[place], np.int64(place - start) * 64 - i
        if i + simd.ones(word) > indices.size:
            return False
        while word:
            high = base + np.int64(simd.lowest(word))
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
    # The unary part follows the last word of low bits, so there always is a next word.
    place, shift = bit >> np.uint64(6), bit & np.uint64(63)
    return words[place] >> shift | words[place + np.uint64(1)] << np.uint64(1) << (np.uint64(63) - shift)

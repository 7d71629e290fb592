"""Packed numbers of a few bits each, ascending indices, and exponents in a prefix code.

Eight codes at a time are shifted by constants in vectors. A loop is compiled for each number of bits, on first use, as
shifts and shuffles must be constants to be fast. Eight codes of b bits are b bytes. These loops read and write 16 or 32
bytes at a time, and stop where these would end too late.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from torch import Tensor

from thinwire.kernels import simd
from thinwire.kernels.bits.reference import CODED, LONGEST, EliasFano, starts_of
from thinwire.kernels.compiled import compiled, intrinsic, overload
from thinwire.kernels.memory import empty
from thinwire.kernels.ranges import map_pieces, map_ranges
from thinwire.kernels.simd import Code, declared

_NUMPY: dict[torch.dtype, Any] = {torch.uint8: np.uint8, torch.int16: np.int16, torch.int32: np.int32}
_WORD = np.dtype("<u8")
_LANES, _BYTE, _NUMBER, _LONG = 8, ir.IntType(8), ir.IntType(32), ir.IntType(64)
_MASK = (1 << LONGEST) - 1


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """See `reference.pack_bits`. At 8 bits, uint8 codes are returned as they are."""
    if bits == 8:
        return codes.to(torch.uint8)
    nbytes = -(-codes.numel() * bits // 8)
    numbers, packed = codes.numpy(), np.empty(nbytes, np.uint8)

    def run(lo: int, hi: int) -> None:
        done = _packing(bits)(numbers, lo, hi, packed)
        pack_loop(numbers, bits, done, hi, packed)

    map_ranges(run, codes.numel(), align=32)
    return torch.from_numpy(packed)


def unpack_bits(buffer: Tensor, count: int, bits: int, dtype: torch.dtype = torch.int16) -> Tensor:
    """See `reference.unpack_bits`. At 8 bits, uint8 codes are a view of the buffer."""
    if bits == 8:
        return buffer[:count].to(dtype)
    codes, data = np.empty(count, _NUMPY[dtype]), buffer.numpy()

    def run(lo: int, hi: int) -> None:
        _unpacking(bits)(data, lo, hi, codes)

    map_ranges(run, count, align=32)
    return torch.from_numpy(codes)


def ones(bits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    places = bits.nonzero().view(-1).to(torch.int32)
    missing = max(0, count - places.numel())
    return torch.nn.functional.pad(places[:count], (0, missing), value=-1), torch.tensor(places.numel(), device="cpu")


def elias_fano_encode(indices: Tensor, space: int) -> Tensor:
    layout = EliasFano.of(indices.numel(), space)
    words = np.zeros(layout.nbytes // 8, _WORD)
    _elias_fano_encode_loop(indices.numpy(), layout.low_bits, words, words[layout.low_nbytes // 8 :])
    return torch.from_numpy(words.view(np.uint8))


def elias_fano_decode(rows: Tensor, count: int, space: int) -> Tensor:
    """See `reference.elias_fano_decode`; rows are decoded in parallel."""
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
def pack_loop(codes, bits, lo, hi, out):
    """Pack codes one by one. Code `lo`, a multiple of 8, begins at a byte."""
    low = np.uint64((1 << bits) - 1)
    word, filled, place = np.uint64(0), 0, lo // 8 * bits
    for i in range(lo, hi):
        word |= (np.uint64(codes[i]) & low) << np.uint64(filled)
        filled += bits
        while filled >= 8:
            out[place] = np.uint8(word & np.uint64(0xFF))
            word >>= np.uint64(8)
            filled -= 8
            place += 1
    if filled:
        out[place] = np.uint8(word)


@compiled
def unpack_loop(buffer, bits, lo, hi, out):
    """Read codes one by one, as `pack_loop` packs them."""
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


def unpack(buffer: Any, bits: Any, lo: Any, hi: Any, out: Any) -> None:
    """Read codes `lo` (a multiple of 8) to `hi` from bytes, in a loop that knows how many bits a code has."""


@overload(unpack, prefer_literal=True)
def _unpack_known(buffer, bits, lo, hi, out):
    loop = _unpacking(bits.literal_value)
    return lambda buffer, bits, lo, hi, out: loop(buffer, lo, hi, out)


@cache
def _unpacking(bits: int) -> Callable[..., None]:
    """Return the loop of `unpack` for so many bits."""
    width = _width(bits)

    @compiled
    def loop(buffer, lo, hi, out):
        at = lo
        while at + 8 <= hi and at // 8 * bits + width <= buffer.size:
            _unpack(buffer, at // 8 * bits, out, at, bits)
            at += 8
        unpack_loop(buffer, bits, at, hi, out)

    return loop


@cache
def _packing(bits: int) -> Callable[..., int]:
    """Return a loop that writes codes `lo` to `hi` (multiples of 32) as bytes, and returns how far it came, of 32s."""
    width = _width(bits)

    @compiled
    def loop(codes, lo, hi, out):
        at = lo
        while at // 8 * bits + width <= hi // 8 * bits:
            _pack(codes, at, out, at // 8 * bits, bits)
            at += 8
        return at // 32 * 32

    return loop


def _width(bits: int) -> int:
    """Return how many bytes are read or written for eight codes."""
    return 16 if bits <= 16 else 32


@intrinsic(prefer_literal=True)
def _unpack(typing, buffer, place, out, at, bits):
    """Write the eight codes that begin at the byte `place` to `out`, from `at` on."""
    wide, size = bits.literal_value, out.dtype.bitwidth
    width, held = _width(wide), 4 if wide <= 25 else 8  # bytes in which a code lies, wherever it begins

    def emit(code: Code, buffer: Any, place: Any, out: Any, at: Any, _bits: Any) -> None:
        read = code.load(buffer, place, ir.VectorType(_BYTE, width))
        firsts, shifts = zip(*(divmod(lane * wide, 8) for lane in range(_LANES)), strict=True)
        order = [min(first + byte, width - 1) for first in firsts for byte in range(held)]
        lanes = ir.VectorType(ir.IntType(8 * held), _LANES)
        spread = code.builder.bitcast(code.shuffled(read, read, order), lanes)
        codes = code.builder.lshr(spread, ir.Constant(lanes, list(shifts)))
        codes = code.builder.and_(codes, ir.Constant(lanes, [(1 << wide) - 1] * _LANES))
        narrow = codes if size == 8 * held else code.builder.trunc(codes, ir.VectorType(ir.IntType(size), _LANES))
        code.store(out, at, narrow, align=size // 8)

    return declared(emit, (buffer, place, out, at, bits))


@intrinsic(prefer_literal=True)
def _pack(typing, codes, at, out, place, bits):
    """Write eight codes from `at` on to the byte `place` and those after it."""
    wide = bits.literal_value

    def emit(code: Code, codes: Any, at: Any, out: Any, place: Any, _bits: Any) -> None:
        builder, lanes, whole = code.builder, ir.VectorType(_LONG, _LANES), ir.IntType(8 * _width(wide))
        long = builder.zext(code.load(codes, at), lanes)
        long = builder.and_(long, ir.Constant(lanes, [(1 << wide) - 1] * _LANES))
        even, odd = (code.shuffled(long, long, list(range(first, _LANES, 2))) for first in (0, 1))
        pairs = builder.or_(even, builder.shl(odd, ir.Constant(even.type, [wide] * (_LANES // 2))))
        packed = ir.Constant(whole, 0)
        for number in range(_LANES // 2):
            pair = builder.zext(builder.extract_element(pairs, ir.Constant(_NUMBER, number)), whole)
            packed = builder.or_(packed, builder.shl(pair, ir.Constant(whole, 2 * wide * number)))
        code.store(out, place, packed, align=1)

    return declared(emit, (codes, at, out, place, bits), lanes=_LANES)


def exponents_count(x: Tensor) -> Tensor:
    numbers = x.numpy()
    parts = map_ranges(lambda lo, hi: _count_loop(numbers[lo:hi]), x.numel())
    return torch.from_numpy(np.sum(parts, axis=0))


def exponents_encode(x: Tensor, codes: Tensor, nbytes: int) -> tuple[Tensor, Tensor, Tensor]:
    numbers, table, blocks = x.numpy(), codes.numpy(), -(-x.numel() // CODED)
    rest, sizes = empty(x.numel(), torch.uint8, x.device), np.zeros(blocks, np.int16)
    stream = torch.zeros(nbytes, dtype=torch.uint8, device="cpu")
    low, out = rest.numpy(), stream.numpy()
    map_ranges(lambda lo, hi: _sizes_loop(numbers, table, lo, hi, low, sizes), x.numel(), align=CODED)
    starts = starts_of(torch.from_numpy(sizes).to(torch.int64)).numpy()
    map_ranges(lambda lo, hi: _encode_loop(numbers, table, lo, hi, starts, out), x.numel(), align=CODED)
    return rest, torch.from_numpy(sizes), stream


def exponents_decode(out: Tensor, rest: Tensor, sizes: Tensor, stream: Tensor, table: Tensor) -> Tensor:
    numbers, low, bits, data, entries = (t.numpy() for t in (out, rest, sizes, stream, table))
    starts = starts_of(sizes.to(torch.int64).clamp(min=0)).numpy()
    good = map_ranges(
        lambda lo, hi: _decode_loop(data, entries, starts, bits, low, lo, hi, numbers), out.numel(), align=CODED
    )
    return torch.tensor(all(good), device="cpu")


@compiled
def _count_loop(x):
    # Four tables, because equal exponents follow one another, and a sum would wait for the last one.
    counts = np.zeros((4, 256), np.int64)
    for i in range(x.size):
        counts[i & 3, (x[i] >> 7) & 0xFF] += 1
    return counts.sum(axis=0)


@compiled
def _sizes_loop(x, codes, lo, hi, rest, sizes):
    for start in range(lo, hi, CODED):
        bits = 0
        for i in range(start, min(start + CODED, hi)):
            bits += codes[(x[i] >> 7) & 0xFF] >> 16
            rest[i] = np.uint8((x[i] & 0x7F) | ((x[i] >> 8) & 0x80))
        sizes[start // CODED] = bits


@compiled
def _encode_loop(x, codes, lo, hi, starts, out):
    for start in range(lo, hi, CODED):
        place, word, filled = starts[start // CODED], np.uint64(0), np.uint64(0)
        for i in range(start, min(start + CODED, hi)):
            entry = codes[(x[i] >> 7) & 0xFF]
            word |= np.uint64(entry & 0xFFFF) << filled
            filled += np.uint64(entry >> 16)
            if filled >= 32:
                for _ in range(4):
                    out[place] = word & np.uint64(0xFF)
                    word >>= np.uint64(8)
                    place += 1
                filled -= np.uint64(32)
        while filled > 0:
            out[place] = word & np.uint64(0xFF)
            word >>= np.uint64(8)
            place += 1
            filled -= min(filled, np.uint64(8))


@compiled
def _decode_loop(data, table, starts, sizes, rest, lo, hi, out):
    good = True
    for start in range(lo, hi, CODED):
        block = start // CODED
        place, left, word, filled = starts[block], np.int64(sizes[block]), np.uint64(0), np.int64(0)
        for i in range(start, min(start + CODED, hi)):
            if filled < LONGEST:
                if place + 4 <= data.size:
                    more = np.uint64(data[place]) | np.uint64(data[place + 1]) << np.uint64(8)
                    more |= np.uint64(data[place + 2]) << np.uint64(16) | np.uint64(data[place + 3]) << np.uint64(24)
                    word |= more << np.uint64(filled)
                else:
                    for j in range(place, data.size):
                        word |= np.uint64(data[j]) << np.uint64(filled + 8 * (j - place))
                place, filled = place + 4, filled + 32
            entry = table[np.int64(word & np.uint64(_MASK))]
            length = np.int64(entry >> 8)
            word >>= np.uint64(length)
            filled -= length
            left -= length
            out[i] = np.int16((rest[i] & 0x7F) | (np.int32(entry) & 0xFF) << 7 | (np.int32(rest[i]) & 0x80) << 8)
        good &= left == 0 and starts[block] + ((np.int64(sizes[block]) + 7) >> 3) <= data.size
    return good

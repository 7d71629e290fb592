"""The exponents of bfloat16 numbers in a prefix code, block by block."""

import numpy as np
import torch
from torch import Tensor

from thinwire.kernels.compiled import compiled
from thinwire.kernels.exponents.reference import CODED, LONGEST, starts_of
from thinwire.kernels.memory import empty
from thinwire.kernels.ranges import map_ranges

_MASK = (1 << LONGEST) - 1


def exponents_count(x: Tensor) -> Tensor:
    numbers = x.numpy()
    parts = map_ranges(lambda lo, hi: _count_loop(numbers[lo:hi]), x.numel())
    return torch.from_numpy(np.sum(parts, axis=0))


def exponents_encode(x: Tensor, codes: Tensor, nbytes: int) -> tuple[Tensor, Tensor, Tensor]:
    numbers, table, blocks = x.numpy(), codes.numpy(), -(-x.numel() // CODED)
    rest, sizes = empty(x.numel(), torch.uint8, x.device), np.zeros(blocks, np.int16)
    stream = torch.zeros(nbytes, dtype=torch.uint8)
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
    return torch.tensor(all(good))


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

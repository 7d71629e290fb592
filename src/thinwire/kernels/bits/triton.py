"""Packed numbers of a few bits each, ascending indices, and exponents in a prefix code."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.kernels.bits import reference
from thinwire.kernels.bits.reference import CODED, LONGEST, EliasFano, Section, starts_of
from thinwire.kernels.memory import constant
from thinwire.kernels.places.triton import edges_until
from thinwire.kernels.triton import launch, tiles_of

_BLOCK = 1024
_BITS = 4096
"""How many bits of the unary part a program reads."""
_ALONE = 64
"""Up to so many programs of a row each count the bits of all: that takes less than a launch."""
_SECTIONS = 6
"""At most so many are written in one launch."""
_LANES = 64
"""How many blocks of exponents a program reads."""


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    out = torch.empty(-(-codes.numel() * bits // 8), dtype=torch.uint8, device=codes.device)
    args = (codes, out, codes.numel(), out.numel())
    launch(_pack, tiles_of(out.numel(), _BLOCK), *args, BITS=bits, BLOCK=_BLOCK)
    return out


def unpack_bits(buffer: Tensor, count: int, bits: int, dtype: torch.dtype = torch.int16) -> Tensor:
    codes = torch.empty(count, dtype=dtype, device=buffer.device)
    launch(_unpack, tiles_of(count, _BLOCK), buffer, codes, count, buffer.numel(), BITS=bits, BLOCK=_BLOCK)
    return codes


def elias_fano_encode(indices: Tensor, space: int) -> Tensor:
    section = Section(indices, space=space)
    out = torch.empty(section.nbytes, dtype=torch.uint8, device=indices.device)
    sections_write(out, [section], [0])
    return out


def sections_write(out: Tensor, sections: Sequence[Section], starts: Sequence[int]) -> None:
    """See `reference.sections_write`: each byte is made from the numbers that overlap it."""
    if len(sections) > _SECTIONS:
        reference.sections_write(out, sections, starts)
        return
    given = [(section, start) for section, start in zip(sections, starts, strict=True) if section.nbytes]
    columns, xs, kinds = list[int](), list[Tensor | None](), list[int]()
    for section, start in given:
        x, count = section.x.contiguous(), section.x.numel()
        layout = EliasFano.of(count if section.space else 0, section.space)
        xs.append(x if section.space or section.bits else x.view(torch.uint8))
        kinds.append(-1 if section.space else section.bits)
        columns += [start, section.nbytes, count, layout.low_bits, layout.low_nbytes, count.bit_length()]
    missing = _SECTIONS - len(given)
    table = constant(tuple(columns), torch.int64, out.device)
    args = (out, out.numel(), table, *xs, *[None] * missing)
    launch(_write, tiles_of(out.numel(), _BLOCK), *args, KINDS=(*kinds, *[0] * missing), BLOCK=_BLOCK)


def elias_fano_decode(rows: Tensor, count: int, space: int) -> Tensor:
    return _read(rows, count, space, None)[0]


def elias_fano_read(rows: Tensor, count: int, space: int, edges: Tensor) -> tuple[Tensor, Tensor]:
    return _read(rows, count, space, edges)


def _read(rows: Tensor, count: int, space: int, edges: Tensor | None) -> tuple[Tensor, Tensor]:
    """See `reference.elias_fano_decode`; all rows at once. The k-th set bit tells the high part of the k-th index.

    What the encoder cannot have written is found without writing it again: padding that is not zero, a number of set
    bits that is not `count`, or an index that is `space` or more or below the one before it.
    """
    ranks, layout = rows.shape[0], EliasFano.of(count, space)
    tiles = tiles_of(layout.unary_bits, _BITS)
    keys = torch.empty(ranks, count, dtype=torch.int32, device=rows.device)
    found, wrong = None, torch.empty(ranks * tiles, dtype=torch.bool, device=rows.device)
    shape = (rows.stride(0), tiles, count, layout.low_bits, layout.low_nbytes, layout.unary_bits)
    if tiles > _ALONE:
        found = keys.new_empty(ranks * tiles)
        launch(_count_bits, ranks * tiles, rows, found, *shape, BITS=_BITS, BLOCK=_BLOCK)
    inner, steps = (0, 0) if edges is None else (edges.numel(), edges.numel().bit_length())
    args = (rows, found, keys, *shape, space, wrong, edges, inner)
    launch(_read_bits, ranks * tiles, *args, STEPS=steps, BITS=_BITS, BLOCK=_BLOCK)
    return keys, wrong


@triton.jit
def _pack(codes, out, count, nbytes, BITS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    byte = _packed(codes, at, count, at < nbytes, BITS, BLOCK)
    tl.store(out + at, (byte & 255).to(tl.uint8), mask=at < nbytes)


@triton.jit
def _packed(codes, at, count, there, bits, BLOCK: tl.constexpr):
    """Return packed bytes, and bits beyond them."""
    first = at * 8 // bits
    byte = tl.zeros([BLOCK], tl.int64)
    for j in range((8 + bits - 2) // bits + 1):  # a byte overlaps at most this many codes
        code = tl.load(codes + first + j, mask=there & (first + j < count), other=0).to(tl.int64)
        byte |= ((code & ((tl.full([BLOCK], 1, tl.int64) << bits) - 1)) << (j * bits)) >> (at * 8 - first * bits)
    return byte


@triton.jit
def _unary(indices, first, count, there, low_bits, steps, BLOCK: tl.constexpr):
    """Return bytes of the unary part, from the bits `first` on: a search finds the first index that sets one."""
    lo, hi = tl.zeros([BLOCK], tl.int64), tl.zeros([BLOCK], tl.int64) + count
    for _ in range(steps):
        middle = (lo + hi) // 2
        inside = there & (lo < hi)
        below = inside & ((tl.load(indices + middle, mask=inside, other=0) >> low_bits) + middle < first)
        lo, hi = tl.where(below, middle + 1, lo), tl.where(below, hi, middle)
    byte = tl.zeros([BLOCK], tl.int64)
    for j in tl.static_range(8):
        inside = there & (lo + j < count)
        bit = (tl.load(indices + lo + j, mask=inside, other=0) >> low_bits) + lo + j - first
        byte |= tl.where(inside & (bit < 8), tl.full([BLOCK], 1, tl.int64) << tl.minimum(tl.maximum(bit, 0), 8), 0)
    return byte


@triton.jit
def _section(byte, at, x, given, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """Return bytes, with those of a section at its places: of what kind, as in `Section`; −1 for Elias-Fano."""
    if x is not None:
        start, nbytes, count = tl.load(given), tl.load(given + 1), tl.load(given + 2)
        before = tl.program_id(0).to(tl.int64) * BLOCK
        if (before < start + nbytes) & (before + BLOCK > start):
            within = at - start
            there = (within >= 0) & (within < nbytes)
            if KIND == 0:
                found = tl.load(x + within, mask=there, other=0).to(tl.int64)
            elif KIND > 0:
                found = _packed(x, within, count, there, KIND, BLOCK)
            else:
                low_bits, low_nbytes, steps = tl.load(given + 3), tl.load(given + 4), tl.load(given + 5)
                high = within - low_nbytes
                low = _packed(x, within, count, there & (high < 0), tl.maximum(low_bits, 1), BLOCK)
                found = _unary(x, high * 8, count, there & (high >= 0), low_bits, steps, BLOCK)
                found = tl.where(high < 0, low, found)
            byte = tl.where(there, found, byte)
    return byte


@triton.jit(do_not_specialize=["nbytes"])
def _write(out, nbytes, table, a, b, c, d, e, f, KINDS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    byte, xs = tl.zeros([BLOCK], tl.int64), (a, b, c, d, e, f)
    for i in tl.static_range(6):
        byte = _section(byte, at, xs[i], table + 6 * i, KINDS[i], BLOCK)
    tl.store(out + at, (byte & 255).to(tl.uint8), mask=at < nbytes)


@triton.jit
def _unpack(buffer, codes, count, nbytes, BITS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    code = code_at(buffer, at, at < count, BITS, nbytes, (BITS + 14) // 8)
    tl.store(codes + at, code.to(codes.dtype.element_ty), mask=at < count)


@triton.jit
def code_at(start, at, there, bits, nbytes, BYTES: tl.constexpr):
    """Return the codes at places in `nbytes` bytes. Each overlaps at most BYTES of them: one of 31 bits, 5."""
    first = at * bits
    word = tl.zeros(at.shape, tl.int64)
    for j in tl.static_range(BYTES):
        inside = there & (first // 8 + j < nbytes)
        word |= tl.load(start + first // 8 + j, mask=inside, other=0).to(tl.int64) << (8 * j)
    return (word >> (first % 8)) & ((tl.full(at.shape, 1, tl.int64) << bits) - 1)


@triton.jit
def _bits_between(start, low_nbytes, unary_bits, first, last, BLOCK: tl.constexpr):
    """Return how many bits are set in bytes of the unary part, and how many of its bytes have a bit of padding set."""
    last = tl.minimum(last, (unary_bits + 63) // 64 * 8)
    found, stray = unary_bits * 0, unary_bits * 0
    for begin in range(first, last, BLOCK):
        place = begin + tl.arange(0, BLOCK)
        byte = tl.load(start + low_nbytes + place, mask=place < last, other=0).to(tl.int32)
        bits = byte & ((1 << tl.maximum(tl.minimum(unary_bits - 8 * place, 8), 0)) - 1)
        stray += tl.sum((byte != bits).to(tl.int32), 0)
        bits -= (bits >> 1) & 0x55
        bits = (bits & 0x33) + ((bits >> 2) & 0x33)
        found += tl.sum((bits + (bits >> 4)) & 0xF, 0)
    return found, stray


@triton.jit
def _low_padding(start, count, low_bits, low_nbytes):
    """Return how many bits of the low parts' padding are set: it has fewer than 64."""
    last = count.to(tl.int64) * low_bits + tl.arange(0, 64)
    rest = tl.load(start + last // 8, mask=last < low_nbytes.to(tl.int64) * 8, other=0).to(tl.int32)
    return tl.sum((rest >> (last % 8).to(tl.int32)) & 1, 0)


@triton.jit(do_not_specialize=["row_stride", "tiles", "count", "low_bits", "low_nbytes", "unary_bits"])
def _count_bits(
    rows, found, row_stride, tiles, count, low_bits, low_nbytes, unary_bits, BITS: tl.constexpr, BLOCK: tl.constexpr
):
    """Count the bits that are set in each tile; −1 where a bit of padding is set."""
    start, tile = rows + (tl.program_id(0) // tiles).to(tl.int64) * row_stride, tl.program_id(0) % tiles
    first = tile * (BITS // 8)
    set_bits, stray = _bits_between(start, low_nbytes, unary_bits, first, first + BITS // 8, BLOCK)
    if tile == 0:
        stray += _low_padding(start, count, low_bits, low_nbytes)
    tl.store(found + tl.program_id(0), tl.where(stray > 0, -1, set_bits))


@triton.jit(
    do_not_specialize=["row_stride", "tiles", "count", "low_bits", "low_nbytes", "unary_bits", "space", "inner"]
)
def _read_bits(
    rows, found, keys, row_stride, tiles, count, low_bits, low_nbytes, unary_bits, space, wrong, edges, inner,
    STEPS: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the keys of a tile. One that cannot be is −1; if the row has stray bits, or not `count`, all are.

    With edges, they are moved inside, and `wrong` says whether one was outside.
    """
    row, tile = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles
    start, place = rows + row * row_stride, tile * BITS + tl.arange(0, BITS)
    if found is None:
        end, stray = tile * (BITS // 8), _low_padding(start, count, low_bits, low_nbytes)
        before, _padding = _bits_between(start, low_nbytes, unary_bits, 0, end, BLOCK)
        rest, padding = _bits_between(start, low_nbytes, unary_bits, end, tiles * (BITS // 8), BLOCK)
        total, stray = before + rest, stray + padding
    else:
        before, total, stray = count * 0, count * 0, count * 0
        for first in range(0, tiles, BLOCK):
            each = first + tl.arange(0, BLOCK)
            bits = tl.load(found + row * tiles + each, mask=each < tiles, other=0)
            total += tl.sum(bits, 0)
            before += tl.sum(tl.where(each < tile, bits, 0), 0)
            stray += tl.sum((bits < 0).to(tl.int32), 0)
    keys += row * count
    if (total != count) | (stray > 0):
        tl.store(wrong + tl.program_id(0), True)
        if tile == 0:
            for first in range(0, count, BLOCK):
                at = first + tl.arange(0, BLOCK)
                tl.store(keys + at, tl.zeros([BLOCK], tl.int32) - (1 if edges is None else 0), mask=at < count)
        return
    byte = tl.load(start + low_nbytes + place // 8, mask=place < unary_bits, other=0).to(tl.int32)
    earlier = tl.load(start + low_nbytes + (place - 1) // 8, mask=(place > 0) & (place < unary_bits), other=0)
    there = (byte >> (place % 8)) & 1
    at = (before + tl.cumsum(there, 0) - there).to(tl.int64)
    there = there > 0
    same = there & ((earlier.to(tl.int32) >> ((place + 7) % 8)) & 1 > 0)  # as high as the one before
    low = code_at(start, at, there, low_bits, low_nbytes, 5)
    key = ((place - at) << low_bits) | low
    bad = (key >= space) | (same & (low < code_at(start, at - 1, same, low_bits, low_nbytes, 5)))
    key = tl.where(bad, -1, key).to(tl.int32)
    if edges is not None:
        outside = there & (edges_until(edges, inner, key, there, STEPS) % 2 == 0)
        tl.store(wrong + tl.program_id(0), tl.max(outside.to(tl.int32), 0) > 0)
        key = tl.maximum(tl.minimum(key, tl.load(edges + inner - 1) - 1), 0)
    tl.store(keys + at, key, mask=there)


def exponents_encode(x: Tensor, codes: Tensor, nbytes: int) -> tuple[Tensor, Tensor, Tensor]:
    blocks = tiles_of(x.numel(), CODED)
    rest = torch.empty(x.numel(), dtype=torch.uint8, device=x.device)
    sizes = torch.empty(blocks, dtype=torch.int32, device=x.device)
    words = torch.zeros(nbytes // 4 + 2, dtype=torch.int32, device=x.device)
    launch(_sizes, blocks, x, codes, rest, sizes, x.numel(), CODED=CODED)
    launch(_encode, blocks, x, codes, starts_of(sizes), words, x.numel(), CODED=CODED)
    return rest, sizes.to(torch.int16), words.view(torch.uint8)[:nbytes]


def exponents_decode(out: Tensor, rest: Tensor, sizes: Tensor, stream: Tensor, table: Tensor) -> Tensor:
    """See `reference.exponents_decode`; each block is a lane."""
    starts, blocks = starts_of(sizes.to(torch.int64).clamp(min=0)), sizes.numel()
    good = torch.ones(max(1, blocks), dtype=torch.int32, device=out.device)
    args = (out, rest, sizes, starts, stream, table, good, out.numel(), stream.numel(), blocks)
    launch(_decode, tiles_of(blocks, _LANES), *args, CODED=CODED, LONGEST=LONGEST, LANES=_LANES)
    return good.bool().all()


@triton.jit
def _entries(x, codes, n, CODED: tl.constexpr):
    """Return a block's places, which exist, the numbers, and their codes' entries: of no length where there is none."""
    at = tl.program_id(0).to(tl.int64) * CODED + tl.arange(0, CODED)
    there = at < n
    number = tl.load(x + at, mask=there, other=0).to(tl.int32)
    return at, there, number, tl.load(codes + ((number >> 7) & 0xFF), mask=there, other=0)


@triton.jit
def _sizes(x, codes, rest, sizes, n, CODED: tl.constexpr):
    at, there, number, entry = _entries(x, codes, n, CODED)
    tl.store(rest + at, ((number & 0x7F) | ((number >> 8) & 0x80)).to(tl.uint8), mask=there)
    tl.store(sizes + tl.program_id(0), tl.sum(entry >> 16, 0))


@triton.jit
def _encode(x, codes, starts, words, n, CODED: tl.constexpr):
    _at, there, _number, entry = _entries(x, codes, n, CODED)
    length = entry >> 16
    bit = tl.load(starts + tl.program_id(0)) * 8 + (tl.cumsum(length, 0) - length)
    shifted = (entry & 0xFFFF).to(tl.int64) << (bit & 31)
    # Of bits that lie apart, the sum is the union.
    tl.atomic_add(words + (bit >> 5), (shifted & 0xFFFFFFFF).to(tl.int32), mask=there)
    tl.atomic_add(words + (bit >> 5) + 1, (shifted >> 32).to(tl.int32), mask=there & ((shifted >> 32) > 0))


@triton.jit
def _decode(
    out, rest, sizes, starts, stream, table, good, n, nbytes, blocks,
    CODED: tl.constexpr, LONGEST: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    lane = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    real = lane < blocks
    begin = tl.load(starts + lane, mask=real, other=0) * 8
    bit = begin
    for i in range(CODED):
        at = lane * CODED + i
        there = real & (at < n)
        byte = bit >> 3
        first = tl.load(stream + byte, mask=there & (byte < nbytes), other=0).to(tl.int32)
        second = tl.load(stream + byte + 1, mask=there & (byte + 1 < nbytes), other=0).to(tl.int32)
        third = tl.load(stream + byte + 2, mask=there & (byte + 2 < nbytes), other=0).to(tl.int32)
        window = (first | (second << 8) | (third << 16)) >> (bit & 7).to(tl.int32)
        entry = tl.load(table + (window & ((1 << LONGEST) - 1)), mask=there, other=0).to(tl.int32)
        low = tl.load(rest + at, mask=there, other=0).to(tl.int32)
        number = (low & 0x7F) | ((entry & 0xFF) << 7) | ((low & 0x80) << 8)
        tl.store(out + at, number.to(tl.int16), mask=there)
        bit += (entry >> 8).to(tl.int64)
    size = tl.load(sizes + lane, mask=real, other=0).to(tl.int64)
    fits = (bit == begin + size) & (((bit + 7) >> 3) <= nbytes)
    tl.store(good + lane, fits.to(tl.int32), mask=real)

"""Indices in slot order, region by region, for all regions and ranks in one launch each."""

from collections.abc import Sequence
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.kernels.hashing.triton import slot_and_quotient, slot_back
from thinwire.kernels.memory import constant
from thinwire.kernels.segments.triton import tiles_of_each
from thinwire.kernels.slotted.reference import Slotted
from thinwire.kernels.triton import launch

_BLOCK = 1024


def slots_encode(indices: Tensor, parts: Sequence[Slotted], seeds: Tensor) -> tuple[Tensor, Tensor]:
    device, columns = indices.device, _columns(parts, indices.device)
    codes, misplaced = torch.empty_like(indices), torch.zeros((), dtype=torch.int64, device=device)
    tiles = tiles_of_each(tuple(part.slots for part in parts), device, _BLOCK)
    launch(_codes, tiles.total, codes, indices, misplaced, columns, seeds, len(parts), *tiles, BLOCK=_BLOCK)
    out = torch.empty(sum(part.nbytes for part in parts), dtype=torch.uint8, device=device)
    tiles = tiles_of_each(tuple(part.nbytes for part in parts), device, _BLOCK)
    launch(_pack, tiles.total, out, codes, columns, len(parts), *tiles, BLOCK=_BLOCK)
    return out, misplaced


def slots_decode(rows: Tensor, parts: Sequence[Slotted], seeds: Tensor) -> Tensor:
    count = sum(part.slots for part in parts)
    out = torch.empty(rows.shape[0], count, dtype=torch.int32, device=rows.device)
    tiles = tiles_of_each(tuple(part.slots for part in parts), rows.device, _BLOCK)
    args = (out, rows, seeds, _columns(parts, rows.device), *rows.stride(), *seeds.stride(), count, len(parts))
    launch(_decode, tiles.total * rows.shape[0], *args, *tiles, BLOCK=_BLOCK)
    return out


def _columns(parts: Sequence[Slotted], device: torch.device) -> Tensor:
    """Return what the kernels need to know of each part, int64 (6, parts)."""
    places, starts = (accumulate(sizes, initial=0) for sizes in ([p.slots for p in parts], [p.nbytes for p in parts]))
    rows = [(*part[:3], part.bits, place, start) for part, place, start in zip(parts, places, starts, strict=False)]
    return constant(tuple(number for column in zip(*rows, strict=True) for number in column), torch.int64, device)


@triton.jit
def _part(columns, part, parts):
    """Return a part's offset, length, slots, bits of a code, first place, and first byte."""
    at = columns + part
    return (
        tl.load(at),
        tl.load(at + parts),
        tl.load(at + 2 * parts),
        tl.load(at + 3 * parts),
        tl.load(at + 4 * parts),
        tl.load(at + 5 * parts),
    )


@triton.jit(do_not_specialize=["parts", "count"])
def _codes(codes, indices, misplaced, columns, seeds, parts, tiles, count, BLOCK: tl.constexpr):
    part = tl.load(tiles + tl.program_id(0))
    offset, length, slots, _bits, first, _start = _part(columns, part, parts)
    place = tl.load(tiles + count + tl.program_id(0)) + tl.arange(0, BLOCK)
    there = place < slots
    index = tl.load(indices + first + place, mask=there, other=0) - offset
    height = (length + slots - 1) // slots
    inside = (index >= 0) & (index < length)
    slot, quotient = slot_and_quotient(tl.where(inside, index, 0), slots, height, tl.load(seeds + part))
    code = tl.where((slot == place) & inside, quotient, tl.where(index == length - 1, height, -1))
    tl.store(codes + first + place, code.to(tl.int32), mask=there)
    wrong = tl.sum((there & (code < 0)).to(tl.int64), 0)
    if wrong > 0:
        tl.atomic_add(misplaced, wrong, sem="relaxed")


@triton.jit(do_not_specialize=["parts", "count"])
def _pack(out, codes, columns, parts, tiles, count, BLOCK: tl.constexpr):
    part = tl.load(tiles + tl.program_id(0))
    _offset, _length, slots, bits, place, start = _part(columns, part, parts)
    at = tl.load(tiles + count + tl.program_id(0)) + tl.arange(0, BLOCK).to(tl.int64)
    there = at < (slots * bits + 7) // 8
    first = at * 8 // bits
    byte = tl.zeros([BLOCK], tl.int64)
    for j in range((8 + bits - 2) // bits + 1):  # a byte overlaps at most this many codes
        code = tl.load(codes + place + first + j, mask=there & (first + j < slots), other=0).to(tl.int64)
        byte |= ((code & ((1 << bits) - 1)) << (j * bits)) >> (at * 8 - first * bits)
    tl.store(out + start + at, (byte & 255).to(tl.uint8), mask=there)


@triton.jit(do_not_specialize=["row_stride", "stride", "seed_stride", "seed_step", "total", "parts", "count"])
def _decode(
    out,
    rows,
    seeds,
    columns,
    row_stride,
    stride,
    seed_stride,
    seed_step,
    total,
    parts,
    tiles,
    count,
    BLOCK: tl.constexpr,
):
    row, tile = (tl.program_id(0) // count).to(tl.int64), tl.program_id(0) % count
    part = tl.load(tiles + tile)
    offset, length, slots, bits, first, start = _part(columns, part, parts)
    place = tl.load(tiles + count + tile) + tl.arange(0, BLOCK).to(tl.int64)
    there = place < slots
    byte_at, last = place * bits // 8, (slots * bits + 7) // 8
    word = tl.zeros([BLOCK], tl.int64)
    for j in tl.static_range(5):  # a code of 31 bits overlaps at most this many bytes
        byte = tl.load(
            rows + row * row_stride + (start + byte_at + j) * stride, mask=there & (byte_at + j < last), other=0
        )
        word |= byte.to(tl.int64) << (8 * j)
    code = (word >> (place * bits - byte_at * 8)) & ((1 << bits) - 1)
    height = (length + slots - 1) // slots
    seed = tl.load(seeds + row * seed_stride + part * seed_step)
    index = slot_back(place, tl.minimum(code, tl.maximum(height - 1, 0)), slots, height, seed)
    index = tl.where((code < height) & (index < length), index, -1)
    index = tl.where(code == height, length - 1, index)
    tl.store(out + row * total + first + place, tl.where(index < 0, -1, index + offset).to(tl.int32), mask=there)

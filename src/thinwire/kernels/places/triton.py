"""Indices on their way: moved to where their vectors lie, and checked when they arrive."""

from collections.abc import Sequence
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.kernels.memory import constant
from thinwire.kernels.triton import launch, tiles_of, tiles_of_each

_BLOCK = 1024
FIXED = 64
"""How many fixed bytes are compared at a time."""
_ROWS = tl.constexpr(16)


def placed(indices: Tensor, regions: Sequence[tuple[int, int]], runs: Sequence[int]) -> Tensor:
    out, device, starts = torch.empty_like(indices), indices.device, accumulate(runs[:-1], initial=0)
    columns = zip(*((offset, offset + length - 1) for offset, length in regions), strict=True)
    table = constant(tuple(number for column in (*columns, starts, runs) for number in column), torch.int32, device)
    tiles = tiles_of_each(tuple(runs), device, _BLOCK)
    launch(_place, len(tiles), out, indices, table, len(runs), tiles, BLOCK=_BLOCK)
    return out


def misplaced(keys: Tensor, edges: Tensor, least: int | None, inside: Tensor | None = None) -> Tensor:
    """See `reference.misplaced`: a bool for each tile."""
    rows, n = keys.shape
    wrong = torch.empty(tiles_of(rows * n, _BLOCK), dtype=torch.bool, device=keys.device)
    steps = edges.numel().bit_length()
    order = {"LEAST": -1 if least is None else least, "STEPS": steps, "BLOCK": _BLOCK}
    launch(_check, wrong.numel(), wrong, keys.contiguous(), edges, inside, rows * n, n, edges.numel(), **order)
    return wrong


def differ(rows: Tensor, fixed: Tensor) -> Tensor:
    """See `reference.differ`: one bool."""
    wrong = torch.empty(1, dtype=torch.bool, device=rows.device)
    launch(_differ, 1, wrong, rows, fixed, rows.shape[0], *rows.stride(), fixed.shape[1], BLOCK=FIXED)
    return wrong


@triton.jit(do_not_specialize=["regions"])
def _place(out, indices, table, regions, tiles, BLOCK: tl.constexpr):
    at = table + tl.load(tiles + 3 * tl.program_id(0))
    begin = tl.load(tiles + 3 * tl.program_id(0) + 1)
    there = begin + tl.arange(0, BLOCK) < tl.load(at + 3 * regions)
    place = tl.load(at + 2 * regions).to(tl.int64) + begin + tl.arange(0, BLOCK)
    index = tl.load(indices + place, mask=there, other=0)
    tl.store(out + place, tl.where(index < 0, tl.load(at + regions), index + tl.load(at)), mask=there)


@triton.jit
def edges_until(edges, count, key, there, STEPS: tl.constexpr):
    """Return how many edges are at most each key."""
    low, high = tl.zeros(key.shape, tl.int32), tl.zeros(key.shape, tl.int32) + count
    for _ in tl.static_range(STEPS):
        middle = (low + high) // 2
        within = (low < high) & (tl.load(edges + middle, mask=there & (low < high), other=0) <= key)
        low, high = tl.where(within, middle + 1, low), tl.where(within, high, middle)
    return low


@triton.jit(do_not_specialize=["total", "n", "count"])
def _check(wrong, keys, edges, inside, total, n, count, LEAST: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = at < total
    key = tl.load(keys + at, mask=there, other=0)
    bad = there & (edges_until(edges, count, key, there, STEPS) % 2 == 0)
    if LEAST >= 0:
        inner = there & (at % n > 0)
        before = tl.load(keys + at - 1, mask=inner, other=0)
        bad |= inner & (key.to(tl.int64) < before.to(tl.int64) + LEAST)
    if inside is not None:
        tl.store(inside + at, tl.maximum(tl.minimum(key, tl.load(edges + count - 1) - 1), 0), mask=there)
    tl.store(wrong + tl.program_id(0), tl.max(bad.to(tl.int32), 0) > 0)


@triton.jit(do_not_specialize=["rows", "stride", "step", "count"])
def _differ(wrong, bytes_, fixed, rows, stride, step, count, BLOCK: tl.constexpr):
    tl.store(wrong, differs(bytes_, fixed, rows, stride, step, count, BLOCK))


@triton.jit
def failed(flags, rows, fixed, ranks, stride, count, given, n, FIXED: tl.constexpr, BLOCK: tl.constexpr):
    """Whether `Checks` with one tensor of flags, if any, fail. The first program writes what they give."""
    wrong = differs(rows, fixed, ranks, stride, 1, count, FIXED)
    tl.store(flags, wrong, mask=tl.program_id(0) == 0)
    return wrong | any_of(flags, given, n, 1, BLOCK)


@triton.jit
def any_of(flags, given, n, before, BLOCK: tl.constexpr):
    """Whether any of the given flags is set. The first program copies them behind those before."""
    found = tl.zeros([BLOCK], tl.int32)
    if given is not None:
        copied = tl.where(tl.program_id(0) == 0, n, 0)
        for first in range(0, n, BLOCK):
            at = first + tl.arange(0, BLOCK)
            flag = tl.load(given + at, mask=at < n, other=0).to(tl.int32)
            tl.store(flags + before + at, flag > 0, mask=at < copied)
            found |= flag
    return tl.max(found, 0) > 0


@triton.jit
def differs(bytes_, fixed, rows, stride, step, count, BLOCK: tl.constexpr):
    """Whether rows of bytes do not all have the fixed ones."""
    bad = tl.zeros([_ROWS, BLOCK], tl.int32)
    for first in range(0, count, BLOCK):
        at = first + tl.arange(0, BLOCK)[None, :]
        place = tl.load(fixed + at, mask=at < count, other=0).to(tl.int64)
        expected = tl.load(fixed + count + at, mask=at < count, other=0)
        bits = tl.load(fixed + 2 * count + at, mask=at < count, other=0)
        for above in range(0, rows, _ROWS):
            row = above + tl.arange(0, _ROWS).to(tl.int64)[:, None]
            there = (row < rows) & (at < count)
            found = tl.load(bytes_ + row * stride + place * step, mask=there, other=0).to(tl.int32)
            bad |= (there & ((found & bits) != expected)).to(tl.int32)
    return tl.max(tl.max(bad, 1), 0) > 0

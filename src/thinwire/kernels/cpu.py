"""The kernels of `reference` for contiguous tensors in main memory, one pass over memory each.

They release the GIL and use no thread pool of Numba's, so any thread may call them; a large tensor is cut into ranges
that run side by side.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from thinwire.kernels import loops, reference

accumulate = reference.accumulate
accumulate_momentum = reference.accumulate_momentum
mix = reference.mix

_T = TypeVar("_T")
_RANGE = 1 << 18
_BITS: dict[torch.dtype, tuple[Any, Any]] = {
    torch.float32: (np.float32, np.int32),
    torch.float64: (np.float64, np.int64),
}


def select(x: Tensor, threshold: float, capacity: int) -> Tensor | None:
    """See `reference.select`."""
    return _over_ranges(loops.select, x, threshold, capacity)


def accumulate_select(
    out: Tensor, residual: Tensor, gradient: Tensor, scale: float, threshold: float, capacity: int
) -> Tensor | None:
    """See `reference.accumulate_select`."""
    real = _BITS[out.dtype][0]
    arrays = [t.numpy() for t in (out, residual, gradient)]
    return _over_ranges(loops.accumulate_select, out, threshold, capacity, *arrays, real(scale))


def accumulate_momentum_select(
    out: Tensor,
    velocity_out: Tensor,
    residual: Tensor,
    velocity: Tensor,
    gradient: Tensor,
    scale: float,
    momentum: float,
    nesterov: bool,
    threshold: float,
    capacity: int,
) -> Tensor | None:
    """See `reference.accumulate_momentum_select`."""
    real = _BITS[out.dtype][0]
    arrays = [t.numpy() for t in (out, velocity_out, residual, velocity, gradient)]
    return _over_ranges(loops.momentum_select, out, threshold, capacity, *arrays, real(scale), real(momentum), nesterov)


def scatter_add(out: Tensor, indices: Tensor, values: Tensor, runs: tuple[int, ...], sign: float = 1.0) -> None:
    """See `reference.scatter_add`; one thread adds in order, so the runs need no heed."""
    real = _BITS[out.dtype][0]
    loops.scatter_add(out.numpy(), indices.numpy(), values.to(out.dtype).numpy(), real(sign))


def mask(x: Tensor, indices: Tensor, values: Tensor) -> None:
    """See `reference.mask`."""
    loops.mask(x.numpy(), indices.numpy(), values.to(x.dtype).numpy())


def hashed_slots(indices: Tensor, priorities: Tensor, slots: int, seed: int) -> Tensor:
    """See `reference.hashed_slots`."""
    table = np.full(slots, -1, np.int64)
    high, low = reference.keys(seed)
    loops.hashed_slots(table, indices.numpy(), priorities.numpy(), np.uint64(high), np.uint64(low))
    return torch.from_numpy(table.astype(np.int32))


def merge(keys: Sequence[Tensor], rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """See `reference.merge`; where all keys ascend already, two tables at a time are merged like cards."""
    if not all(bool((key[1:] >= key[:-1]).all()) for key in keys):
        return reference.merge(keys, rows)
    merged, out = keys[0][:0], rows[0][:0]
    for key, row in zip(keys, rows, strict=True):
        merged, out = _merge_two(merged, out, key, row)
    return merged, out


def _merge_two(keys_a: Tensor, rows_a: Tensor, keys_b: Tensor, rows_b: Tensor) -> tuple[Tensor, Tensor]:
    most = keys_a.numel() + keys_b.numel()
    keys, rows = keys_a.new_empty(most), rows_a.new_empty(most, rows_a.shape[1])
    arrays = [t.numpy() for t in (keys, rows, keys_a, rows_a, keys_b, rows_b)]
    count = loops.merge(*arrays)
    return keys[:count], rows[:count]


def sketch_insert(x: Tensor, rows: int, buckets: int, seed: int) -> Tensor:
    """See `reference.sketch_insert`."""
    table = x.new_zeros(rows, buckets)
    for j in range(rows):
        loops.sketch_insert(table[j].numpy(), x.numpy(), *_sketch_keys(seed, j))
    return table


def sketch_query(table: Tensor, numel: int, seed: int) -> Tensor:
    """See `reference.sketch_query`."""
    estimates = table.new_empty(table.shape[0], numel)
    for j in range(table.shape[0]):
        loops.sketch_read(estimates[j].numpy(), table[j].numpy(), *_sketch_keys(seed, j))
    out = table.new_empty(numel)
    loops.median(out.numpy(), estimates.numpy())
    return out


def _sketch_keys(seed: int, j: int) -> tuple[Any, Any]:
    high, low = reference.keys(reference.SKETCH_ROWS * seed + j)
    return np.uint64(high), np.uint64(low)


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """See `reference.pack_bits`."""
    nbytes = -(-codes.numel() * bits // 8)
    words = np.empty(-(-nbytes // 4), np.dtype("<u4"))
    _map_ranges(lambda lo, hi: loops.pack_bits(codes.numpy(), bits, lo, hi, words), codes.numel(), align=32)
    return torch.from_numpy(words.view(np.uint8)[:nbytes])


def unpack_bits(buffer: Tensor, count: int, bits: int) -> Tensor:
    """See `reference.unpack_bits`."""
    codes = np.empty(count, np.int16)
    _map_ranges(lambda lo, hi: loops.unpack_bits(buffer.numpy(), bits, lo, hi, codes), count, align=32)
    return torch.from_numpy(codes)


def _over_ranges(kernel: Callable[..., int], x: Tensor, threshold: float, capacity: int, *rest: Any) -> Tensor | None:
    """Run a selecting kernel on ranges of `x` in parallel and join the indices they found."""
    real, integer = _BITS[x.dtype]
    bits = x.numpy().view(integer)
    least = max(real(threshold).view(integer), integer(1))
    sign = np.iinfo(integer).max

    def run(lo: int, hi: int) -> tuple[np.ndarray[Any, Any], int]:
        found = np.empty(min(capacity, hi - lo) + loops.BLOCK + 1, np.int32)
        return found, kernel(bits, integer(sign), least, lo, hi, found, capacity, *rest)

    parts = _map_ranges(run, x.numel())
    if sum(count for _, count in parts) > capacity:
        return None
    return torch.from_numpy(np.concatenate([found[:count] for found, count in parts]))


def _map_ranges(run: Callable[[int, int], _T], numel: int, align: int = 1) -> list[_T]:
    """Run on ranges that start at multiples of `align`."""
    workers = max(1, min(torch.get_num_threads(), numel // _RANGE))
    if workers == 1:
        return [run(0, numel)]
    edges = [*(numel * i // workers // align * align for i in range(workers)), numel]
    return list(_pool(workers).map(run, edges[:-1], edges[1:]))


@cache
def _pool(workers: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(workers, thread_name_prefix="thinwire")

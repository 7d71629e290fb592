"""Work on parts of a large tensor in several threads.

The threads are Python's: compiled loops release the GIL, and Numba's own pool cannot be called from just any thread.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, TypeVar

import numpy as np
import torch

_T = TypeVar("_T")
_RANGE, _PIECES = 1 << 18, 4


def map_ranges(run: Callable[[int, int], _T], numel: int, align: int = 1) -> list[_T]:
    """Return run(lo, hi) of ranges that cover 0 to numel, in order. Each starts at a multiple of `align`.

    A large tensor gets several ranges per thread, so that a slow thread takes fewer of them.
    """
    workers = max(1, min(torch.get_num_threads(), numel // _RANGE))
    if workers == 1:
        return [run(0, numel)]
    pieces = workers * max(1, min(_PIECES, numel // workers // (_PIECES * _RANGE)))
    edges = [*(numel * i // pieces // align * align for i in range(pieces)), numel]
    return list(_pool(workers).map(run, edges[:-1], edges[1:]))


def is_single_threaded(numel: int) -> bool:
    """Whether a tensor of so many elements is too small to divide among threads."""
    return numel < 2 * _RANGE


def map_groups(run: Callable[[int, int], None], sizes: np.ndarray[Any, Any]) -> None:
    """Call run(first, last) for groups of adjacent tensors of these sizes, about as many elements in each."""
    ends = sizes.cumsum()
    workers = max(1, min(torch.get_num_threads(), len(sizes), int(sizes.sum()) // _RANGE))
    if workers == 1:
        run(0, len(sizes))
        return
    edges = [0, *(int(np.searchsorted(ends, ends[-1] * i / workers)) + 1 for i in range(1, workers)), len(sizes)]
    list(_pool(workers).map(run, edges[:-1], edges[1:]))


def map_pieces(run: Callable[[int], _T], pieces: Sequence[np.ndarray[Any, Any]]) -> list[_T]:
    """Return run(i) for each of several arrays. `run` must not use this module, for the reason above."""
    workers = min(torch.get_num_threads(), len(pieces), sum(map(len, pieces)) // _RANGE)
    return list((map if workers < 2 else _pool(workers).map)(run, range(len(pieces))))


@cache
def _pool(workers: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(workers, thread_name_prefix="thinwire")


os.register_at_fork(after_in_child=_pool.cache_clear)  # a forked process inherits the pool, but none of its threads
